"""A restart in processes that stand by: they have imported what the ranks had."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from endings import SCRIPTS, end_of, opened, wait_for
from start_jobs import HANG_SECONDS, allowed, lean

SCRIPT = SCRIPTS / "standing_by.py"
PYTHON = Path(sys.executable)


@pytest.fixture
def start(tmp_path):
    """A function that starts a function of the script with the launcher of a Python."""
    started = []

    def run(python, *words, options=(), program=None, **variables):
        command = [python, "-m", "keras_dist.launch.cli", "run", "-np", 2, "--max-restarts", 2]
        path = f"{python.parent}:/usr/bin:/bin"
        variables |= {"FAULT_FOLDER": str(tmp_path), "KERAS_DIST_MEMORY_DIRECTORY": str(tmp_path)}
        environment = lean("jax", PATH=path, **variables)
        started.append(opened([*command, *options, *(program or [SCRIPT]), *words], environment))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def processes_of(folder):
    """Returns the processes of a job, by the variable that all of them have."""
    found, wanted = [], f"FAULT_FOLDER={folder}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            pass
    return found


def nothing_left(folder, but_files=False):
    wait_for(lambda: not processes_of(folder), allowed(5))
    assert not processes_of(folder)
    assert but_files or not [*folder.glob("keras_dist_backups-*/*/imports")]


@pytest.mark.slow
@pytest.mark.fault(
    "a rank is killed, twice, under `keras-dist run --max-restarts`, with MPICH and Open MPI",
    "the processes that stand by go on at once, as ranks that have imported everything",
    within=60,
)
@pytest.mark.parametrize(
    ("python_of_library", "program"),
    [("mpich", "script"), ("openmpi", "module")],
    indirect=["python_of_library"],
)
def test_a_restart_imports_nothing(start, python_of_library, tmp_path, program):
    words = ["python", "-O", *([SCRIPT] if program == "script" else ["-m", SCRIPT.stem])]
    path = os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    job = start(python_of_library, "die_twice", "a b", program=words, PYTHONPATH=path)
    printed = end_of(job, tmp_path)
    assert job.returncode == 0, printed
    nothing_left(tmp_path)
    folder = str(SCRIPTS if program == "script" else Path.cwd())
    for restart, ahead in enumerate([[], ["numpy"], ["numpy"]]):
        starts = re.findall(rf"start {restart} ahead .*", printed)
        argv = [str(SCRIPT), "die_twice", "a b"]
        expected = f"start {restart} ahead {ahead} __main__ {argv} {folder} True 1"
        assert starts == [expected] * 2, printed
    assert printed.count("in 0 s.") == 2


@pytest.mark.slow
def test_training_goes_on_to_the_same_bits(start, tmp_path):
    job = start(PYTHON, "train", tmp_path / "backup", KERAS_BACKEND="torch")
    printed = end_of(job, tmp_path)
    assert job.returncode == 0, printed
    # The step in flight is repeated, and none before it.
    assert printed.count("ahead ['keras', 'numpy'] steps [(1, 0)") == 2, printed
    assert printed.count("the bits of an uninterrupted fit") == 2
    nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.fault(
    "Ctrl-C, SIGTERM or SIGKILL to `keras-dist run`, or the end of the job, while processes stand "
    "by for a restart",
    "these processes end, without a word",
    within=5,
)
@pytest.mark.parametrize(
    ("python_of_library", "name"),
    [
        *(("mpich", "SIGTERM"), ("mpich", "SIGKILL"), ("mpich", "ends")),
        *(("openmpi", "SIGINT"), ("openmpi", "SIGKILL")),
    ],
    indirect=["python_of_library"],
)
def test_processes_that_stand_by_end_with_the_launcher(start, python_of_library, tmp_path, name):
    job = start(python_of_library, "wait", name)
    for _ in range(2):
        while "ready" not in (line := job.stdout.readline()):
            assert line, "the job ended"
    told = time.monotonic()
    if name != "ends":
        job.send_signal(getattr(signal, name))
    printed, _ = job.communicate(timeout=HANG_SECONDS)
    # Without the launcher, mpiexec may kill the processes before they remove the file.
    nothing_left(tmp_path, but_files=name == "SIGKILL")
    assert time.monotonic() - told < allowed(5)
    if name == "ends":
        assert (job.returncode, printed) == (0, "")
