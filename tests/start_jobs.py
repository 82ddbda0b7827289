"""Helpers to start jobs: the launcher, and scripts without a framework."""

import os
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
    left_out = " ".join({"jax", "sklearn", "tensorflow"} - used)
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "LEFT_OUT": left_out}


def script(text):
    """Returns the command that runs a script with `runtime` imported and no framework."""
    return [sys.executable, "-c", BARE + text]


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
        time.sleep(0.02 + 9 * (time.monotonic() - asked))  # the answer may take a process


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
