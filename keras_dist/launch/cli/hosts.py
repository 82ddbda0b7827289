"""Hosts and their slots: from options, files or a batch system; and whether they answer.

Names are checked against a pattern, because they become arguments of commands such as ssh.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from keras_dist import errors

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
LINE = re.compile(
    r"(?P<name>[^\s:]+)(:(?P<short>\d+))?(\s+slots\s*=\s*(?P<long>\d+))?"
    r"(\s+max[_-]slots\s*=\s*\d+)?"
)
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


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The allocation of a batch system."""

    system: str
    hosts: Mapping[str, int]
    ranks: int | None


def parse_hosts(text: str) -> dict[str, int]:
    """Parses ranks by host from `h1:2,h2:2`; a host without a number has one."""
    return _collect(text.split(","), "--hosts to be like h1:2,h2:2")


def read_hostfile(path: str) -> dict[str, int]:
    """Reads ranks by host from a file with one host per line: `h1 slots=2` or `h1:2`."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise argument_error("a hostfile", f"{path}: {error}", "Pass a text file.") from None
    expected = f"each line of {path} to be like 'h1 slots=2' or 'h1:2'"
    return _collect(_lines(text), expected)


def parse_lines(text: str) -> dict[str, int]:
    """Parses ranks by host from the text of a hostfile. Raises `ValueError` for another text."""
    return _count(_lines(text))


def check_names(hosts: Iterable[str]) -> None:
    """Checks that host names resolve, before anything waits for a host."""
    for name in hosts:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:  # an empty label, or one of 64 letters
            raise errors.LaunchError(
                "[keras-dist]",
                "resolvable host names",
                f"{name!r}: {getattr(error, 'strerror', error)}",
                "Correct --hosts or the hostfile; `getent hosts NAME` checks a name.",
            ) from None


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the allocation of the batch system in the environment; `None` without one."""
    if "SLURM_JOB_ID" in environment:
        return _slurm(environment)
    if "PBS_NODEFILE" in environment:
        return _from_lines("PBS", environment["PBS_NODEFILE"])
    if "LSB_DJOB_HOSTFILE" in environment:
        return _from_lines("LSF", environment["LSB_DJOB_HOSTFILE"])
    if "LSB_MCPU_HOSTS" in environment:
        words = environment["LSB_MCPU_HOSTS"].split()
        pairs = zip(words[::2], words[1::2], strict=False)
        hosts = _collect([f"{name}:{slots}" for name, slots in pairs], "LSB_MCPU_HOSTS")
        return Allocation("LSF", hosts, sum(hosts.values()))
    if "PE_HOSTFILE" in environment:
        return Allocation("Grid Engine", {}, None)
    return None


def _slurm(environment: Mapping[str, str]) -> Allocation:
    names: list[str] = []
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        nodes = environment.get("SLURM_JOB_NODELIST", "")
        command = ["scontrol", "show", "hostnames", nodes]
        if nodes and not nodes.startswith("-"):
            names = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
            ).stdout.split()
    slots = _slurm_slots(environment.get("SLURM_TASKS_PER_NODE", ""))
    if not names or len(slots) != len(names):
        return Allocation("Slurm", {}, _number(environment.get("SLURM_NTASKS")))
    pairs = [f"{name}:{number}" for name, number in zip(names, slots, strict=True)]
    hosts = _collect(pairs, "the hosts of Slurm")
    return Allocation("Slurm", hosts, _number(environment.get("SLURM_NTASKS")))


def _slurm_slots(text: str) -> list[int]:
    """Expands Slurm's compressed form of tasks per node, such as `4(x2),3`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _from_lines(system: str, path: str) -> Allocation:
    """Reads a file with one line for each rank."""
    hosts = read_hostfile(path)
    # With one line for each node the file does not give the number of ranks.
    names_only = len(hosts) > 1 and set(hosts.values()) == {1}
    return Allocation(system, hosts, None if names_only else sum(hosts.values()))


def _lines(text: str) -> list[str]:
    return [line for raw_line in text.splitlines() if (line := raw_line.partition("#")[0].strip())]


def _collect(texts: Iterable[str], expected: str) -> dict[str, int]:
    try:
        hosts = _count(texts)
    except ValueError as error:
        raise argument_error(
            expected,
            str(error),
            "A host name has letters, digits, dots and dashes, and starts with a letter or digit. "
            "The number of slots after it is 1 or more.",
        ) from None
    if not hosts:
        raise argument_error(expected, "no host", "Name a host, or leave the option out.")
    return hosts


def _count(texts: Iterable[str]) -> dict[str, int]:
    """Returns ranks by host. Raises `ValueError` with the first invalid text."""
    hosts: collections.Counter[str] = collections.Counter()
    for text in texts:
        found = LINE.fullmatch(text.strip())
        slots = int(found["short"] or found["long"] or 1) if found else 0
        if found is None or not NAME.fullmatch(found["name"]) or slots < 1:
            raise ValueError(repr(text.strip()))
        hosts[found["name"]] += slots
    return dict(hosts)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def argument_error(expected: str, received: str, remedy: str) -> errors.ArgumentError:
    """Returns an error about options or variables of the launcher."""
    return errors.ArgumentError("[keras-dist]", expected, received, remedy)


def ssh_of_mpiexec(environment: Mapping[str, str]) -> str | None:
    """Returns the ssh by which mpiexec enters hosts; `None` without, or with another launcher."""
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
            found = f"{received} from {name}"
            raise errors.LaunchError("[keras-dist]", expected, found, remedy)


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
