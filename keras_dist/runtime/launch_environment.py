"""What a launcher's environment variables say about the job. Knows no MPI.

mpirun, mpiexec and srun tell each process through the environment how many ranks the job
has. MPI itself is the truth; these variables serve to notice when MPI and the launcher do
not belong together, and to size thread pools before MPI is up.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist._compat.python import inherits_script

__all__ = [
    "Announcement",
    "announced_local_rank",
    "announced_local_size",
    "announced_rank",
    "announced_size",
    "forget_threads",
    "has_sized_threads",
    "is_child",
    "limit_threads",
    "starts_ranks",
]

# Launcher, variable with the number of ranks. The first that is present wins: a process
# started by mpirun inside a Slurm allocation carries both kinds.
SIZES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"),
    ("the Hydra mpiexec of MPICH or Intel MPI (or another PMI launcher)", "PMI_SIZE"),
    ("srun", "SLURM_STEP_NUM_TASKS"),
    ("Slurm", "SLURM_NTASKS"),
)
THREADS = "TF_NUM_INTRAOP_THREADS"
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

_sized = False


@dataclasses.dataclass(frozen=True)
class Announcement:
    """What a launcher said.

    Args:
        launcher: its name in words.
        variable: the environment variable that said so.
        size: the number of ranks it speaks of, at least.
    """

    launcher: str
    variable: str
    size: int


def announced_size(environment: Mapping[str, str] = os.environ) -> Announcement | None:
    """Returns what the launcher says about the number of ranks; `None` when nothing does.

    `PMIX_RANK` names this process' rank alone, so it can only say that there are at least
    that many ranks and one more.
    """
    for launcher, variable in SIZES:
        size = _number(environment.get(variable))
        if size is not None:
            return Announcement(launcher, variable, size)
    rank = _number(environment.get("PMIX_RANK"))
    if rank is not None:
        return Announcement("a PMIx launcher", "PMIX_RANK", rank + 1)
    return None


def announced_local_size(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of ranks on this node as the launcher says; 1 when nothing does."""
    size = _first_number(LOCAL_SIZES, environment)
    return _slurm_tasks_per_node(environment) if size is None else size


def announced_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of this process as the launcher says; `None` when nothing does."""
    return _first_number(RANKS, environment)


def announced_local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of this process on its node; `None` when no launcher says it."""
    return _first_number(LOCAL_RANKS, environment)


def is_child() -> bool:
    """Tells whether `multiprocessing` has started this process: its parent is the rank.

    It inherits the environment, and a script that is not guarded runs in it from the top.
    """
    process: Any = sys.modules.get("multiprocessing.process")  # in a child it is there
    if process is None:
        return False
    return inherits_script() or process.parent_process() is not None


def starts_ranks() -> bool:
    """Tells whether a launcher has started this process as one of several ranks."""
    announced = announced_size()
    return announced is not None and announced.size > 1 and not is_child()


def limit_threads() -> None:
    """Gives TensorFlow's compute pool this rank's share of the cores, unless it is set.

    TensorFlow sizes its pool when the first operation runs, which may come before
    `keras_dist.init()` in a script that leaves `init` to keras_dist; only an environment
    variable set at import reaches it in time.
    """
    global _sized
    local_size = announced_local_size()
    if local_size > 1 and THREADS not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        everything = os.cpu_count() or 1
        share = cores if 0 < cores < everything else max(1, everything // local_size)
        os.environ[THREADS] = str(share)
        _sized = True


def forget_threads() -> None:
    """Takes the pool's size out of the environment again, if it is ours: another program follows.

    There it would look like the user's choice.
    """
    global _sized
    if _sized:
        del os.environ[THREADS]
        _sized = False


def has_sized_threads() -> bool:
    """Tells whether the pool's size in the environment is ours, and not the user's choice."""
    return _sized


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
