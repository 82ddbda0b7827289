"""The check of hosts before a job: mpiexec can enter each of them, and finds Python there."""

import concurrent.futures
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

from keras_dist import errors

__all__ = ["check_reach"]

SECONDS = 20  # for the answer of a host
CHECKS = 32  # at the same time
NOT_ENTERED = 255  # exit code of ssh for its own errors
# With these, mpiexec may enter hosts by another program.
LAUNCHERS = ("HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP", "PRTE_MCA_plm", "OMPI_MCA_plm")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def check_reach(hosts: Iterable[str], environment: Mapping[str, str]) -> None:
    """Enters other hosts with ssh and starts the Python of this process, all at the same time.

    Without ssh, or where a variable selects another launcher of mpiexec, nothing is checked.

    Args:
        hosts: names of the hosts.
        environment: environment of mpiexec.

    Raises:
        LaunchError: a host cannot be entered, does not answer in time, or has another Python.
    """
    ssh = shutil.which("ssh", path=environment.get("PATH"))
    if ssh is None or any(name.startswith(LAUNCHERS) for name in environment):
        return
    others = [name for name in hosts if not _is_this_host(name)]
    with concurrent.futures.ThreadPoolExecutor(CHECKS) as pool:
        answers = pool.map(lambda name: _start_python(ssh, name), others)
    for name, (expected, received, remedy) in zip(others, answers, strict=True):
        if received:
            text = errors.explain("[keras-dist]", expected, f"{received} from {name}", remedy)
            raise errors.LaunchError(text)


def _is_this_host(name: str) -> bool:
    """Returns whether an address of a host belongs to this one."""
    for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _start_python(ssh: str, name: str) -> tuple[str, str, str]:
    """Returns what was expected of a host, what it answered if that is wrong, and the remedy."""
    program = "import sys; print('python', *sys.version_info[:2])"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS // 2}"]
    enters = f"`ssh -o BatchMode=yes {name} true` must succeed without a password."
    entry = f"to enter {name} with ssh"
    try:
        ended = subprocess.run(
            [ssh, *options, name, f'"{sys.executable}" -c "{program}"'],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return entry, f"no answer within {SECONDS} s", enters
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    told = f"exit code {ended.returncode} ({lines[-1] if lines else 'no message'})"
    if ended.returncode == NOT_ENTERED:
        return entry, told, enters
    expected = f"Python {PYTHON} at {sys.executable} on {name}"
    remedy = "Install the same environment at the same path on every host, or share one."
    if ended.returncode != 0:
        return expected, told, remedy
    found = ended.stdout.rpartition("python ")[2].split()
    return expected, "" if ".".join(found) == PYTHON else f"Python {'.'.join(found)}", remedy
