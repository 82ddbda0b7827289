"""Helpers to start jobs: the launcher, and scripts without a framework."""

import contextlib
import functools
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

# Printed by Open MPI's mpiexec when it fails before it starts a rank, which happens rarely.
NOT_STARTED = "PMIx server's listener thread failed"

# A job that takes longer hangs. A machine that is slow or has much to do needs some of it.
HANG_SECONDS = 300

# The launcher, as the command `keras-dist run`.
RUN = [sys.executable, "-m", "keras_dist.launch.cli", "run"]
SCRIPTS = Path(__file__).with_name("scripts")
# Without a framework: the engine suffices to test how a job starts, stalls and ends.
BARE = (Path(__file__).parent / "faults" / "scripts" / "bare.py").read_text()


def lean(*needed, **variables):
    """Returns the environment of a job that imports only the `needed` optional packages."""
    return {**os.environ, **lean_variables(*needed, **variables)}


def lean_variables(*needed, **variables):
    """Returns the variables of `lean` that this process does not have."""
    environment = {**os.environ, **variables}
    # TensorFlow imports JAX if it is installed, and Keras imports TensorFlow on all backends.
    used = {*needed, environment.get("KERAS_BACKEND", "tensorflow")}
    folders = [str(Path(__file__).with_name("lean")), environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    left_out = " ".join({"jax", "sklearn", "tensorflow"} - used)
    return {**variables, "PYTHONPATH": path, "LEFT_OUT": left_out, "NEEDED": " ".join(needed)}


def without_launcher(**variables):
    """Returns the environment without what the launcher or the settings of these tests say."""
    names = ("OMPI_", "PMI", "PMIX_", "SLURM_", "MPI_", "HYDRA", "PRTE", "KERAS_DIST_")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(names)}
    return {**clean, **variables}


def run(command, **options):
    """Runs a command with all output in one text; returns the completed process."""
    return subprocess.run(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        **options,
    )


def keras_dist(*words, **options):
    """Runs the command line in a process."""
    return run([sys.executable, "-m", "keras_dist.launch.cli", *words], **options)


def in_a_terminal(command, **options):
    """Runs a command that succeeds in a terminal; returns what the terminal gets."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, **options
    ) as job:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # the error of a terminal whose other end is closed
            while chunk := os.read(ours, 4096):
                printed += chunk
        os.close(ours)
    assert job.returncode == 0, printed
    return printed.decode()


def script(text):
    """Returns the command that runs a script with `runtime` imported and no framework."""
    return [sys.executable, "-c", BARE + text]


@functools.cache
def launcher():
    """Returns the mpiexec of this environment, with the options that it needs on any machine."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version:
        # By default it refuses to run as root, and to start more ranks than cores.
        return [mpiexec, "--allow-run-as-root", "--oversubscribe"]
    return [mpiexec]


def told(job, pattern):
    """Returns the match of the only line of a successful job that matches the pattern.

    It need not be the last line: warnings of the ranks may follow it.
    """
    assert job.returncode == 0, job.stdout
    found = [*filter(None, (re.fullmatch(pattern, line) for line in job.stdout.splitlines()))]
    assert len(found) == 1, job.stdout
    return found[0]


def allowed(seconds):
    """Returns how long something may take that takes some seconds where each rank has a core.

    A machine with more to do than it has cores gets the time of its share.
    """
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_for(condition, seconds=HANG_SECONDS):
    """Waits until a condition holds, or some seconds; returns whether it holds."""
    end = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if condition():
            return True
        if asked > end:
            return False
        # The answer may take a process, which leaves most of the time to the others.
        time.sleep(min(0.02 + 9 * (time.monotonic() - asked), 1))


def pids(folder):
    """Returns the processes of a job, each of which wrote a file `pid-N`."""
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def is_alive(pid):
    """Returns whether a process is running or stopped; a zombie is neither."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def made_by(found):
    """Returns the files that processes left in /dev/shm."""
    made = Path("/dev/shm").glob("keras_dist-*")
    return {str(path) for path in made if int(path.name.split("-")[2]) in found}
