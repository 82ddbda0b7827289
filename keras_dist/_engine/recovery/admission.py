"""Admission: a communicator that continues with more ranks, which have joined a running job.

What ranks have built together (shared memory, plans, services) is dropped, as after a death, and
built again by all, so that new ranks and old ones make the same collectives. Independent of how
MPI has connected them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_dist import errors
from keras_dist._engine.mpi.library import leave_without_finalizing
from keras_dist._engine.recovery.retry import Retry

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator


def check_admits(comm: "Communicator") -> None:
    """Checks that a communicator may get more ranks."""
    if comm.subsets:
        raise errors.ArgumentError(
            comm.where(),
            "no process sets where ranks may join",
            f"{comm.subsets} of them",
            "Remove the process sets, or start the job without ranks that join.",
        )


def admit(
    comm: "Communicator",
    world: Any,
    are_spawned: bool = False,
    start_services: Callable[[], None] | None = None,
) -> None:
    """Continues with the ranks of a larger MPI communicator. Collective: all of them; blocks."""
    comm.order.drain()
    with comm.lock:
        comm.disconnect()
        before = comm.size if start_services is None else 0
        comm.connect(world)
        if start_services is not None:
            start_services()
        faults = comm.faults
        joins, changes, survives, spawned, before = world.bcast(
            (faults.joins, faults.changes, faults.retry is not None, faults.spawned, before)
        )
        faults.joins, faults.changes = joins + 1, changes + 1
        faults.spawned = spawned | {*range(before, comm.size)} if are_spawned else spawned
        comm.digests.count = comm.faults.changes << 32
        if are_spawned:
            faults.endures = leave_without_finalizing()
        comm.faults.retry = Retry(comm) if survives else None
        comm.bucket_nbytes = None  # measured for another number of ranks
