"""Communicators of some of the ranks, from their numbers or from a communicator of the user's."""

from collections.abc import Sequence
from typing import Any

from keras_dist import errors
from keras_dist._engine.communicator import Communicator

__all__ = ["places_of", "subset"]


def subset(job: Communicator, ranks: Sequence[int]) -> Communicator:
    """Makes a communicator of some of the ranks. Collective: those ranks alone; blocks.

    Args:
        job: all of them.
        ranks: their numbers there, ascending, this one among them.
    """
    if job.mpi is None:
        return Communicator(job=job, ranks=ranks)
    everyone = job.world.Get_group()
    group = everyone.Incl(ranks)
    comm = job.world.Create_group(group)
    made = Communicator(job.mpi, comm, job.reduce, job, ranks)
    comm.Free()
    group.Free()
    everyone.Free()
    return made


def places_of(job: Communicator, comm: Any) -> tuple[int, ...]:
    """Returns which of the ranks a user's communicator holds, ascending.

    Raises:
        ArgumentError: it holds others as well.
    """
    if job.mpi is None or comm == job.mpi.COMM_NULL:
        return ()
    theirs, ours = comm.Get_group(), job.world.Get_group()
    places = theirs.Translate_ranks(None, ours)
    theirs.Free()
    ours.Free()
    if job.mpi.UNDEFINED not in places:
        return tuple(sorted(places))
    raise errors.ArgumentError(
        errors.explain(
            "[keras_dist.ProcessSet]",
            "an MPI communicator of ranks of this job",
            f"one of {len(places)} ranks, not all of which are",
            "Make it from the communicator that was passed to keras_dist.init, or from COMM_WORLD.",
        )
    )
