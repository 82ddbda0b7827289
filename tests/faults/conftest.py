"""Fixtures of the fault tests: a job, the time of its fault, and how it ended.

The mark of a test is its row in docs/reliability.md:

    @pytest.mark.fault("a rank is killed", "the job ends, exit code not 0", within=5)

and runs the job with the fixture `job`. The script calls `fault()` right before the fault; the
fixture checks that all ranks ended `within` seconds after it. A test may have several marks.

    python -m pytest tests/faults --fault-table write    writes the table from the passed tests
    python -m pytest tests/faults --fault-table check    fails where the table differs
"""

import contextlib
import dataclasses
import difflib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import BARE, NOT_STARTED, is_alive, launcher, lean, made_by, pids

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by tests/faults/conftest.py -->\n", "<!-- end -->\n"

# Part of every script: records the time of the fault and the processes of the job.
PREAMBLE = """
import os, pathlib, time
def fault():
    pathlib.Path(os.environ["FAULT_FOLDER"], "fault").write_text(str(time.time()))
    maps = open("/proc/self/maps").read()
    names = [line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line]
    pathlib.Path(os.environ["FAULT_FOLDER"], "shared").write_text("\\n".join(names))
pathlib.Path(os.environ["FAULT_FOLDER"], f"pid-{os.getpid()}").touch()
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended: exit code, output, seconds from `fault()` to the end if it was called."""

    returncode: int
    stdout: str
    seconds: float | None


@pytest.fixture
def job(request, tmp_path):
    """A function that runs a script on n ranks and checks what holds for every fault.

    No process is left, no file of the job is left in /dev/shm, and it ended in time. `bare` scripts
    import `runtime` and no framework.
    """
    mark = request.node.get_closest_marker("fault")
    within = mark.kwargs["within"] if mark else 60

    def run(
        ranks,
        text,
        bare=False,
        python=None,
        options=(),
        timeout=90,
        leaves=None,
        tries=3,
        **variables,
    ):
        folder = tmp_path / f"job-{len(list(tmp_path.glob('job-*')))}"
        folder.mkdir()
        command = [*launcher(), *options, "-n", str(ranks), sys.executable]
        environment = lean(FAULT_FOLDER=str(folder), **variables)
        if python is not None:
            command = [python.with_name("mpiexec"), "--allow-run-as-root", "--oversubscribe"]
            command += [*options, "-n", str(ranks), python]
            names = ("PMI", "MPI_", "HYDRA", "MPIR_")
            environment = {n: v for n, v in environment.items() if not n.startswith(names)}
        program = PREAMBLE + (BARE if bare else "") + text
        with subprocess.Popen(
            [*command, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=timeout)
                gone_at = all_gone(folder, printed)
            finally:
                process.kill()
                for pid in pids(folder):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if NOT_STARTED in printed and tries > 1:
            how = (bare, python, options, timeout, leaves, tries - 1)
            return run(ranks, text, *how, **variables)
        moment = folder / "fault"
        seconds = gone_at - float(moment.read_text()) if moment.exists() else None
        assert mark is None or moment.exists(), printed
        assert seconds is None or seconds < within, printed
        assert not left_in_shared_memory(folder, leaves)
        return Ended(process.returncode, printed, seconds)

    return run


def all_gone(folder, printed):
    """Waits until all processes of a job have ended; fails after some seconds."""
    end = time.monotonic() + 5
    while alive := [pid for pid in pids(folder) if is_alive(pid)]:
        assert time.monotonic() < end, f"still there: {alive}\n{printed}"
        time.sleep(0.05)
    return time.time()


def left_in_shared_memory(folder, but=None):
    """Returns files left in /dev/shm: mapped at the fault, or named after processes of the job.

    Files with `but` in their names are removed instead.
    """
    mapped = folder / "shared"
    found = set(mapped.read_text().splitlines()) if mapped.exists() else set()
    found |= made_by(pids(folder))
    left = {name for name in found if os.path.exists(name)}
    expected = {name for name in left if but is not None and but in name}
    for name in expected:
        os.unlink(name)
    return left - expected


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
        title = f"{len(rows)} faults, each with a test of its own:\n\n"
        header = "| fault | what happens | within | tested by |\n|---|---|---|---|\n"
        wanted = f"{head}{BEGIN}{title}{header}{''.join(rows)}{END}{tail}"
        if self._wish == "write":
            DOCUMENT.write_text(wanted)
        elif wanted != found:
            lines = (text.splitlines(True) for text in (found, wanted))
            diff = difflib.unified_diff(*lines, str(DOCUMENT), "what passed", n=0)
            sys.stdout.writelines(diff)
            session.exitstatus = 1
