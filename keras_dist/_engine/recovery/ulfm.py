"""User-level failure mitigation (ULFM) of Open MPI 5: ranks that continue after others have died.

A call that waits for a dead rank fails on some rank, which revokes the communicator, so that the
call fails on all. The surviving ranks can still agree, and shrink the communicator to themselves.
Every rank must agree and shrink equally often, or two of these calls would match each other.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_dist import errors
from keras_dist._engine.faults.progress import describe_progress
from keras_dist._engine.faults.rank_lost import have
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.shm.wait import also_blocked, blocked, note

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

NEWS_SECONDS = 1.0  # MPI may report a death this much later
NAP_SECONDS = 1e-3

_log = logging.getLogger("keras_dist")


def is_loss(comm: "Communicator", error: BaseException) -> bool:
    """Returns whether an error comes from the death of a rank, as far as this rank can know."""
    if isinstance(error, errors.RankLostError) or failed_process(comm.mpi, error):
        return True
    # Received data may be invalid, and noticed before the death is reported.
    patience = 0.0 if isinstance(error, errors.KerasDistError) else NEWS_SECONDS
    end = time.perf_counter() + patience
    while not (known := sees_dead_ranks(comm.world)) and time.perf_counter() < end:
        time.sleep(NAP_SECONDS)
    return known


def agree(comm: "Communicator", fine: bool) -> bool:
    """Returns whether all ranks are alive and have succeeded; the same on all ranks.

    Collective: every rank that is alive; blocks.
    """
    return _agree(comm.mpi, comm.world, fine)


def check_alive(comm: "Communicator") -> None:
    """Checks that no rank has died, where the job continues without ranks that die. Collective."""
    if comm.faults.retry is not None and not agree(comm, True):
        raise errors.RankLostError("A rank has died.")


def leave(comm: "Communicator") -> None:
    """Releases all ranks that wait for this one."""
    if comm.node is not None:
        comm.node.leave()
    for world in comm.topology.mpi_communicators:
        world.Revoke()


def rebuild(comm: "Communicator", exchange: Callable[[], Any]) -> Any:
    """Rebuilds a communicator from the surviving ranks. Collective: all of them; blocks.

    If another rank dies meanwhile, all start again without it.
    """
    if comm.subsets:
        raise errors.RankLostError(
            comm.where(),
            "no process sets where the job continues without a rank that has died",
            f"{comm.subsets} of them, and a rank that has died",
            "Start the job again, or do not use process sets.",
        )
    before = shrunk = comm.world
    found, complete = None, False
    note(comm.ranks, "the recovery from the death of a rank")
    while not complete:
        leave(comm)
        comm.disconnect()
        with blocked:
            shrunk = shrunk.Shrink()
        try:
            with blocked:
                alone = shrunk.Dup()
            comm.connect(alone)
            found, fine = exchange(), True
        except Exception as error:
            if not is_loss(comm, error):
                raise
            leave(comm)
            fine = False
        complete = _agree(comm.mpi, shrunk, fine)
    gone = _missing(comm.mpi, before, shrunk)
    comm.faults.losses += len(gone)
    comm.faults.changes += 1
    # Ranks may have counted differently when the rank died.
    comm.digests.count = comm.faults.changes << 32
    if comm.rank == 0:
        progress = describe_progress()
        where = f" ({progress})" if progress else ""
        _log.warning(
            f"keras_dist: {have(gone)} died{where}. {comm.size} of {before.Get_size()} ranks "
            "continue, renumbered in their order."
        )
    return found


def _agree(mpi: Any, world: Any, fine: bool) -> bool:
    try:
        with also_blocked():
            return bool(world.Agree(fine and not sees_dead_ranks(world)))
    except mpi.Exception:
        return False


def sees_dead_ranks(world: Any) -> bool:
    """Returns whether a rank of a communicator has died, or another rank has noticed that."""
    dead = world.Get_failed()
    count = dead.Get_size()
    dead.Free()
    return bool(count) or world.Is_revoked()


def _missing(mpi: Any, before: Any, after: Any) -> list[int]:
    """Returns the ranks of a communicator that are not in another one."""
    old, new = before.Get_group(), after.Get_group()
    indices = old.Translate_ranks(None, new)
    old.Free()
    new.Free()
    return [rank for rank, index in enumerate(indices) if index == mpi.UNDEFINED]
