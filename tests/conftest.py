"""What pure tests use to start a job of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

# Without a framework: the engine is enough to tell how a job starts, stands still and ends.
BARE = """
from keras_dist import _backends, runtime
class Nothing:
    def pin_device(*args): pass
    def limit_threads(*args, **kwargs): pass
_backends.active = lambda: Nothing
"""


def script(text):
    """Returns the command that runs a text with `runtime` imported, and no framework."""
    return [sys.executable, "-c", BARE + text]


def launcher():
    """Returns the mpiexec beside this Python, with what it needs to run anywhere."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version:
        # It would refuse to run as root and to start more ranks than there are cores.
        return [mpiexec, "--allow-run-as-root", "--oversubscribe"]
    return [mpiexec]


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
