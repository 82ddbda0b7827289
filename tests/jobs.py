"""How tests start jobs of their own: the launcher, and scripts that need no framework."""

import os
import re
import subprocess
import sys
from pathlib import Path

# What Open MPI's mpiexec says where it fails before any rank, as it does now and then.
NOT_STARTED = "PMIx server's listener thread failed"

# Without a framework: the engine is enough to tell how a job starts, stands still and ends.
BARE = """
from keras_dist import _backends, runtime
class Nothing:
    def pin_device(*args): pass
    def limit_threads(*args, **kwargs): pass
    def finish_calls(): pass
_backends.active = lambda: Nothing
"""


def lean(*needed, **variables):
    """Returns the environment of a job that imports no more of others than what is `needed`."""
    environment = {**os.environ, **variables}
    # TensorFlow imports JAX where it is, and Keras TensorFlow on all backends.
    used = {*needed, environment.get("KERAS_BACKEND", "tensorflow")}
    folders = [str(Path(__file__).with_name("lean")), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return {**environment, "LEFT_OUT": " ".join({"jax", "sklearn", "tensorflow"} - used)}


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


def told(job, pattern):
    """Returns the match of the one line that a job, which has ended well, printed so.

    It need not be the last: warnings of the ranks come by another way.
    """
    assert job.returncode == 0, job.stdout
    found = [*filter(None, (re.fullmatch(pattern, line) for line in job.stdout.splitlines()))]
    assert len(found) == 1, job.stdout
    return found[0]


def pids(folder):
    """Returns the processes of a job, each of which has left a file `pid-N` there."""
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def is_alive(pid):
    """Tells whether a process runs, or is stopped; what has ended may still have a number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def made_by(found):
    """Returns what processes have made in /dev/shm and is there still."""
    made = Path("/dev/shm").glob("keras_dist-*")
    return {str(path) for path in made if int(path.name.split("-")[2]) in found}
