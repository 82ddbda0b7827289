"""Fixtures of the fault tests: a job, the time of its fault, and how it ended.

The mark of a test is its row in docs/reliability.md:

    @pytest.mark.fault("a rank is killed", "the job ends, exit code not 0", within=5)

and runs a program of `scripts` with the fixture `job`. The program calls `fault()` right before the
fault; the fixture checks that all ranks ended `within` seconds after it. A test may have several
marks.

    python -m pytest tests/faults --fault-table write    writes the table from the passed tests
    python -m pytest tests/faults --fault-table check    fails where the table differs
"""

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from endings import SCRIPTS, all_gone, left_in_shared_memory, opened
from start_jobs import HANG_SECONDS, NOT_STARTED, RUN, allowed, launcher, lean, pids

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by tests/faults/conftest.py -->\n", "<!-- end -->\n"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended: exit code, output, seconds from `fault()` to the end if it was called."""

    returncode: int
    stdout: str
    seconds: float | None

    def succeeded(self, *told):
        """Returns the output of a job that must have succeeded, with some words in it."""
        assert self.returncode == 0, self.stdout
        assert all(words in self.stdout for words in told), self.stdout
        return self.stdout

    def failed(self, *told):
        """Returns the output of a job that must have failed, with some words in it."""
        assert self.returncode != 0, self.stdout
        assert all(words in self.stdout for words in told), self.stdout
        return self.stdout


@pytest.fixture
def job(request, tmp_path):
    """A function that runs a program on n ranks and checks what holds for every fault.

    No process is left, no file of the job is left in /dev/shm, and it ended in time.
    """
    mark = request.node.get_closest_marker("fault")
    within = mark.kwargs["within"] if mark else 60

    def run(
        ranks,
        script,
        *arguments,
        python=None,
        options=(),
        leaves=None,
        tries=3,
        **variables,
    ):
        folder = tmp_path / f"job-{len(list(tmp_path.glob('job-*')))}"
        folder.mkdir()
        start = [*launcher(), *options, "-n", ranks, sys.executable]
        texts = {name: str(value) for name, value in variables.items()}
        environment = lean(FAULT_FOLDER=str(folder), **texts)
        if python is not None:
            start = [python.with_name("mpiexec"), "--allow-run-as-root", "--oversubscribe"]
            start += [*options, "-n", ranks, python]
            names = ("PMI", "MPI_", "HYDRA", "MPIR_")
            environment = {n: v for n, v in environment.items() if not n.startswith(names)}
        program = script if script == "-c" else SCRIPTS / script
        with opened([*start, program, *arguments], environment) as process:
            try:
                printed, _ = process.communicate(timeout=HANG_SECONDS)
                print(printed)  # for a test that fails
                gone_at = all_gone(folder, printed)
            finally:
                process.kill()
                for pid in pids(folder):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if NOT_STARTED in printed and tries > 1:
            how = {"python": python, "options": options, "leaves": leaves}
            return run(ranks, script, *arguments, tries=tries - 1, **how, **variables)
        moment = folder / "fault"
        seconds = gone_at - float(moment.read_text()) if moment.exists() else None
        assert mark is None or moment.exists(), printed
        assert seconds is None or seconds < allowed(within), printed
        assert not left_in_shared_memory(folder, leaves)
        return Ended(process.returncode, printed, seconds)

    return run


@pytest.fixture
def meet(job):
    """`job` whose ranks reduce, until some do something else; see `meeting.py`."""
    return lambda ranks, *words, **options: job(ranks, "meeting.py", *words, **options)


@pytest.fixture
def fit_job(job, tmp_path):
    """`job` with two ranks that train on JAX, and a folder of its jobs."""
    variables = {"KERAS_BACKEND": "jax", "FOLDER": str(tmp_path / "folder")}
    return lambda *words, **options: job(2, *words, **{**variables, **options})


@pytest.fixture
def ulfm_job(job, open_mpi):
    """`job` with Open MPI, whose ranks are told of the death of another and can go on."""
    return functools.partial(job, python=open_mpi, options=("--with-ft", "ulfm"))


@pytest.fixture
def go_on(ulfm_job):
    """`ulfm_job` with the wish to go on after a rank has died."""
    return functools.partial(ulfm_job, KERAS_DIST_ON_FAILURE="continue")


@pytest.fixture
def launch(tmp_path):
    """A function that starts `keras-dist run` with options, a program and its arguments."""
    started = []

    def run(*words, **variables):
        program = [SCRIPTS / word if str(word).endswith(".py") else word for word in words]
        environment = lean(FAULT_FOLDER=str(tmp_path), **variables)
        started.append(opened([*RUN, *program], environment))
        return started[-1]

    yield run
    for process in started:
        process.kill()


# --- The table of docs/reliability.md


def pytest_addoption(parser):
    parser.addoption("--fault-table", choices=("check", "write"), help=f"the table of {DOCUMENT}")


def pytest_configure(config):
    config.pluginmanager.register(Table(config), "fault table")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties += [("row", row) for row in rows(item)]
    return report


def rows(item):
    """Returns the rows of a test, from its marks."""
    test = f"`{item.path.stem}::{item.originalname}`"
    marks = [(*mark.args, mark.kwargs["within"]) for mark in item.iter_markers("fault")]
    return [f"| {fault} | {outcome} | {within} s | {test} |\n" for fault, outcome, within in marks]


class Table:
    """Collects the rows of passed tests and of slow tests, including those of xdist workers."""

    def __init__(self, config):
        self._wish = config.getoption("--fault-table")
        self._rows = {}
        self._skipped = {}

    def pytest_runtest_logreport(self, report):
        rows = {row: report.nodeid for name, row in report.user_properties}
        if report.when == "call" and report.passed:
            self._rows |= rows
        elif report.skipped:
            self._skipped |= rows

    def pytest_deselected(self, items):
        """Slow tests keep their rows: they run with `-m slow`."""
        self._rows |= {row: item.nodeid for item in items for row in rows(item)}

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_testnodedown(self, node):
        self._rows |= getattr(node, "workeroutput", {}).get("fault rows", {})

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["fault rows"] = self._rows
            return
        if self._wish is None:
            return
        found = DOCUMENT.read_text()
        # A test that this machine cannot run keeps its row.
        self._rows |= {row: test for row, test in self._skipped.items() if row in found}
        head, _, tail = re.split(f"{BEGIN}|{END}", found)
        rows = sorted(self._rows, key=lambda row: (self._rows[row].partition("::")[0], row))
        title = f"{len(rows)} faults, each with its test:\n\n"
        header = "| fault | what happens | within | tested by |\n|---|---|---|---|\n"
        wanted = f"{head}{BEGIN}{title}{header}{''.join(rows)}{END}{tail}"
        if self._wish == "write":
            DOCUMENT.write_text(wanted)
        elif wanted != found:
            lines = (text.splitlines(True) for text in (found, wanted))
            diff = difflib.unified_diff(*lines, str(DOCUMENT), "what passed", n=0)
            sys.stdout.writelines(diff)
            session.exitstatus = 1
