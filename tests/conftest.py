"""What pure tests use to start a job of their own."""

import subprocess
import sys

import hypothesis
import pytest
from jobs import launcher

# A busy machine may take its time over an example.
hypothesis.settings.register_profile("patient", deadline=None)
# The same examples each time, and none is made smaller: a mutant is to be found, not understood.
hypothesis.settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    max_examples=25,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def run_ranks():
    """A function that runs Python with some arguments on n ranks, and returns how it ended."""

    def run(ranks, *arguments, timeout=120, **options):
        return subprocess.run(
            [*launcher(), "-n", str(ranks), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            **options,
        )

    return run
