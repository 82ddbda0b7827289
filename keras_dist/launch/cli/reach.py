"""The check of hosts before a job: mpiexec can enter them, and Python and MPI are the same."""

import concurrent.futures
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

from keras_dist import errors

SECONDS = 20  # for the answer of a host
CHECKS = 32  # at the same time
NOT_ENTERED = 255  # exit code of ssh for its own errors
# With these, mpiexec may enter hosts by another program.
LAUNCHERS = ("HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP", "PRTE_MCA_plm", "OMPI_MCA_plm")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Prints the version of Python, then that of the MPI library, which another program of mpiexec
# belongs to. It runs within double quotes of a shell.
PROGRAM = (
    "import sys; print('python', *sys.version_info[:2]); import mpi4py; "
    "mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print('mpi', *MPI.Get_library_version().strip(chr(0)).splitlines()[0].split(',')[0].split())"
)


def ssh_of_mpiexec(environment: Mapping[str, str]) -> str | None:
    """Returns the path of the ssh by which mpiexec enters hosts.

    `None` without ssh, or where a variable selects another launcher of mpiexec.
    """
    if any(name.startswith(LAUNCHERS) for name in environment):
        return None
    return shutil.which("ssh", path=environment.get("PATH"))


def check_reach(hosts: Iterable[str], ssh: str) -> None:
    """Enters other hosts with ssh and compares Python and MPI, all at the same time."""
    others = [name for name in hosts if not _is_this_host(name)]
    if not others:
        return
    here = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    mpi = _told(here.stdout, "mpi")
    with concurrent.futures.ThreadPoolExecutor(CHECKS) as pool:
        answers = pool.map(lambda name: _start_python(ssh, name, mpi), others)
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


def _start_python(ssh: str, name: str, mpi: str) -> tuple[str, str, str]:
    """Returns what was expected of a host, what it answered if that is wrong, and the remedy."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS // 2}"]
    enters = f"`ssh -o BatchMode=yes {name} true` must succeed without a password."
    entry = f"to enter {name} with ssh"
    try:
        ended = subprocess.run(
            [ssh, *options, name, f'"{sys.executable}" -c "{PROGRAM}"'],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return entry, f"no answer within {SECONDS} s", enters
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    failed = f"exit code {ended.returncode} ({lines[-1] if lines else 'no message'})"
    if ended.returncode == NOT_ENTERED:
        return entry, failed, enters
    remedy = "Install the same environment at the same path on every host, or share one."
    found = ".".join(_told(ended.stdout, "python").split())
    if found != PYTHON:
        received = f"Python {found}" if found else failed
        return f"Python {PYTHON} at {sys.executable} on {name}", received, remedy
    # Without an MPI library here, the ranks say what is missing.
    expected = f"{mpi}, the MPI library of this host, at {sys.executable} on {name}"
    received = _told(ended.stdout, "mpi") or failed
    return expected, "" if received == mpi or not mpi else received, remedy


def _told(output: str, name: str) -> str:
    """Returns the rest of the last line that begins with a name; empty if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(f"{name} ")]
    return lines[-1].removeprefix(name).strip() if lines else ""
