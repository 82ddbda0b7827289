"""Communicators of some of the ranks, for process sets."""

from collections.abc import Sequence
from typing import Any

from keras_dist import errors
from keras_dist._engine.communicator import Communicator


def subset(job: Communicator, ranks: Sequence[int]) -> Communicator:
    """Makes a communicator of some of the ranks. Collective: only those ranks; blocks."""
    if job.mpi is None:
        return Communicator(job=job, ranks=ranks)
    everyone = job.world.Get_group()
    group = everyone.Incl(ranks)
    comm = job.world.Create_group(group)
    made = Communicator(job.mpi, comm, job.reduce, job, ranks, job.reduction)
    comm.Free()
    group.Free()
    everyone.Free()
    return made


def ranks_of(job: Communicator, comm: Any) -> tuple[int, ...]:
    """Returns the ranks of a user's MPI communicator, ascending."""
    if job.mpi is None or comm == job.mpi.COMM_NULL:
        return ()
    theirs, ours = comm.Get_group(), job.world.Get_group()
    ranks = theirs.Translate_ranks(None, ours)
    theirs.Free()
    ours.Free()
    if job.mpi.UNDEFINED not in ranks:
        return tuple(sorted(ranks))
    raise errors.ArgumentError(
        "[keras_dist.ProcessSet]",
        "an MPI communicator of ranks of this job",
        f"one of {len(ranks)} processes, not all of which are",
        "Make it from the communicator that was passed to keras_dist.init, or from COMM_WORLD.",
    )
