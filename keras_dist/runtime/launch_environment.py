"""The environment variables by which launchers describe the job. Does not use MPI.

MPI itself is authoritative; these variables serve to detect that MPI and the launcher do not match,
and to size thread pools before MPI is initialized.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist._compat.python import inherits_script

# Launcher and its variable for the number of ranks. The first variable that is set wins: a
# process started by mpirun inside a Slurm allocation has both kinds.
SIZES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"),
    ("the Hydra mpiexec of MPICH or Intel MPI (or another PMI launcher)", "PMI_SIZE"),
    ("srun", "SLURM_STEP_NUM_TASKS"),
    ("Slurm", "SLURM_NTASKS"),
)
# The variables of TensorFlow's pools, and the least number of threads in each: while one of the
# second waits in a host call, the call may run a graph, which needs another.
THREADS = {"TF_NUM_INTRAOP_THREADS": 1, "TF_NUM_INTEROP_THREADS": 2}
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

_sized: set[str] = set()  # the variables of `THREADS` that `limit_threads` has set


@dataclasses.dataclass(frozen=True)
class Announcement:
    """The number of ranks that a launcher announces."""

    launcher: str
    variable: str
    size: int


def announced_size(environment: Mapping[str, str] = os.environ) -> Announcement | None:
    """Returns the announced number of ranks, at least; `None` without a launcher."""
    for launcher, variable in SIZES:
        size = _number(environment.get(variable))
        if size is not None:
            return Announcement(launcher, variable, size)
    rank = _number(environment.get("PMIX_RANK"))  # a lower bound
    if rank is not None:
        return Announcement("a PMIx launcher", "PMIX_RANK", rank + 1)
    return None


def announced_local_size(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the announced number of ranks on this node; 1 without a launcher."""
    size = _first_number(LOCAL_SIZES, environment)
    return _slurm_tasks_per_node(environment) if size is None else size


def announced_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the announced rank of this process; `None` without a launcher."""
    return _first_number(RANKS, environment)


def announced_local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the announced local rank of this process; `None` without a launcher."""
    return _first_number(LOCAL_RANKS, environment)


def is_child() -> bool:
    """Returns whether `multiprocessing` has started this process from a rank's script."""
    process: Any = sys.modules.get("multiprocessing.process")  # always imported in a child
    if process is None:
        return False
    return inherits_script() or process.parent_process() is not None


def starts_ranks() -> bool:
    """Returns whether a launcher has started this process as one of several ranks."""
    announced = announced_size()
    return announced is not None and announced.size > 1 and not is_child()


def limit_threads(count: int | None = None) -> None:
    """Sizes TensorFlow's thread pools, unless the user has."""
    # TensorFlow creates its pools when the first operation runs, which may be before
    # `keras_dist.init()`; only environment variables set at import take effect in time.
    local_size = announced_local_size()
    if count is None and local_size > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        everything = os.cpu_count() or 1
        count = cores if 0 < cores < everything else max(1, everything // local_size)
    if count is not None:
        for name, least in THREADS.items():
            if name in _sized or name not in os.environ:
                os.environ[name] = str(max(count, least))
                _sized.add(name)


def restore_threads() -> None:
    """Unsets what `limit_threads` has set: another program would take it for the user's choice."""
    for name in _sized:
        del os.environ[name]
    _sized.clear()


def has_sized_threads() -> bool:
    """Returns whether `limit_threads`, not the user, has set the size of the compute pool."""
    return next(iter(THREADS)) in _sized


def _first_number(variables: Sequence[str], environment: Mapping[str, str]) -> int | None:
    found = (_number(environment.get(variable)) for variable in variables)
    return next((number for number in found if number is not None), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _slurm_tasks_per_node(environment: Mapping[str, str]) -> int:
    """Reads the first number of Slurm's compressed form, such as `4(x2),3`."""
    if _number(environment.get("SLURM_STEP_NUM_TASKS")) is None:
        return 1
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE"))
    return _number((text or "1").split(",")[0].split("(")[0]) or 1
