"""The mpiexec of the MPI library of mpi4py, and its options."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from keras_dist import errors
from keras_dist.launch.rank_wrapper import cores_of_process

# These mean that slots come from a batch system.
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE")
VERSION_SECONDS = 20  # to print the version


@dataclasses.dataclass(frozen=True)
class Library:
    """An MPI library."""

    vendor: str
    version: tuple[int, ...]
    text: str

    @property
    def is_open_mpi(self) -> bool:
        """Whether the launcher is that of Open MPI; others use Hydra of MPICH."""
        return self.vendor in ("Open MPI", "Spectrum MPI")

    @property
    def survives_rank_loss(self) -> bool:
        """Whether ranks can continue after the death of a rank (ULFM)."""
        return self.vendor == "Open MPI" and self.version >= (5,)


def load_library() -> Library:
    """Returns the MPI library that ranks will load. Does not initialize MPI."""
    import mpi4py

    initialize, mpi4py.rc.initialize = mpi4py.rc.initialize, False  # this process is not a rank
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises either
        raise errors.LaunchError(
            "[keras-dist]",
            "an MPI library",
            f"none: {str(error).splitlines()[0]}",
            "pip install 'keras_dist[mpich]', or load the cluster's MPI module.",
        ) from None
    finally:
        mpi4py.rc.initialize = initialize
    text = " ".join(MPI.Get_library_version().replace("\0", "").split()[:5])
    return Library(*MPI.get_vendor(), text)


def find_mpiexec(library: Library) -> str:
    """Returns the path of the mpiexec of a library."""
    # Wheels install mpiexec beside Python. The first one on the PATH may belong to another library,
    # and its ranks would not find each other.
    seen = []
    for path in dict.fromkeys(_candidates()):
        if _matches(_version(path), library):
            return path
        seen.append(path)
    others = f"only {', '.join(seen)}, of another library" if seen else "none"
    raise errors.LaunchError(
        "[keras-dist]",
        f"the mpiexec of {library.text} next to {sys.executable} or on the PATH",
        others,
        "Load the module of that library, or start the job with srun, not keras-dist run.",
    )


def mpiexec_options(
    library: Library,
    ranks: int,
    passed: Sequence[str],
    survives_rank_loss: bool,
    hosts: Mapping[str, int] | None = None,
    binds: bool = True,
) -> list[str]:
    """Returns the options of an mpiexec."""
    options = ["-n", str(ranks)]
    if not library.is_open_mpi:
        return [*options, *(_hydra_hosts(library, hosts) if hosts else [])]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    if hosts:
        options += ["--host", listed(hosts)]
    elif not any(name in os.environ for name in ALLOCATIONS) and ranks > len(cores_of_process()):
        options.append("--oversubscribe")  # the slots of Open MPI are the physical cores
    if not binds:
        options += ["--bind-to", "none"]
    if survives_rank_loss:
        options += ["--with-ft", "ulfm"]
    for name in passed:
        options += ["-x", name]
    return options


def _hydra_hosts(library: Library, hosts: Mapping[str, int]) -> list[str]:
    if library.vendor != "Intel MPI":
        return ["-hosts", listed(hosts)]
    slots = set(hosts.values())
    if len(slots) > 1:
        raise errors.LaunchError(
            "[keras-dist]",
            "the same number of ranks for each host, with Intel MPI",
            listed(hosts),
            "Leave out the hosts and pass --mpi-args '-machinefile FILE'.",
        )
    return ["-ppn", str(*slots), "-hosts", ",".join(hosts)]


def listed(hosts: Mapping[str, int]) -> str:
    """Returns hosts with their slots as mpiexec takes them."""
    return ",".join(f"{name}:{slots}" for name, slots in hosts.items())


def _matches(version: str, library: Library) -> bool:
    """Tells whether an mpiexec belongs to a library, by its version text."""
    if "Open MPI" in version or library.is_open_mpi:
        spectrum = library.vendor == "Spectrum MPI"
        return library.is_open_mpi and (
            "Spectrum" in version if spectrum else f"(Open MPI) {library.version[0]}." in version
        )
    return ("Intel" in version) == (library.vendor == "Intel MPI")


def _candidates() -> Iterator[str]:
    beside = str(Path(sys.executable).with_name("mpiexec"))
    for name in (beside, "mpiexec", "mpirun", "mpiexec.hydra"):
        if (path := shutil.which(name)) is not None:
            yield path


def _version(mpiexec: str) -> str:
    try:
        return subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=VERSION_SECONDS,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""  # not executable
