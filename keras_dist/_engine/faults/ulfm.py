"""The ranks that live, when others have died: how they hear of it, agree on it and go on.

Rests on what MPI calls user-level failure mitigation, which Open MPI 5 has: calls that wait for
the dead fail on some rank, which revokes the communicator, so that they fail on all; those that
live can still agree, and shrink the communicator to themselves. Every rank must agree and shrink
equally often, whatever it has seen, or two of these would be taken for each other.

Knows MPI's communicators by what they can do.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_dist import errors
from keras_dist._engine.faults.progress import say_progress
from keras_dist._engine.faults.rank_lost import have
from keras_dist._engine.mpi.library import failed_process
from keras_dist._engine.shm.wait import also_blocked, blocked, note

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

__all__ = ["agree", "assure", "is_loss", "leave", "rebuild"]

NEWS_SECONDS = 1.0  # how long the news of a death may be on its way
NAP_SECONDS = 1e-3

_log = logging.getLogger("keras_dist")


def is_loss(comm: "Communicator", error: BaseException) -> bool:
    """Tells whether an error comes of a rank that has died, as far as this rank can know."""
    if isinstance(error, errors.RankLostError) or failed_process(comm.mpi, error):
        return True
    # What was received may be nonsense, which is noticed before the death is.
    patience = 0.0 if isinstance(error, errors.KerasDistError) else NEWS_SECONDS
    end = time.perf_counter() + patience
    while not (known := _knows_of_dead(comm.world)) and time.perf_counter() < end:
        time.sleep(NAP_SECONDS)
    return known


def agree(comm: "Communicator", fine: bool) -> bool:
    """Tells whether all ranks live and are fine; the answer is the same on all.

    Collective: every rank that lives; blocks.
    """
    return _agree(comm.mpi, comm.world, fine)


def assure(comm: "Communicator") -> None:
    """Makes sure, where ranks go on without those that die, that none has. Collective.

    Raises:
        RankLostError: one has; raised on every rank.
    """
    if comm.recovery is not None and not agree(comm, True):
        raise errors.RankLostError("A rank has died.")


def leave(comm: "Communicator") -> None:
    """Makes sure that no rank waits for this one any longer."""
    if comm.node is not None:
        comm.node.leave()
    for world in comm.worlds:
        world.Revoke()


def rebuild(comm: "Communicator", exchange: Callable[[], Any]) -> Any:
    """Makes a communicator one of the ranks that live. Collective: all of those; blocks.

    Ranks that die meanwhile are left out as well: all begin again.

    Args:
        comm: the ranks.
        exchange: the last step, collective too.

    Returns:
        What `exchange` returns.

    Raises:
        RankLostError: there are process sets, of which nobody knows what they are without the
            dead; raised on every rank.
    """
    if comm.subsets:
        raise errors.RankLostError(
            errors.explain(
                comm.where(),
                "no process sets where ranks go on without one that has died",
                f"{comm.subsets} of them, and a rank that has died",
                "Start the job again, or do without process sets.",
            )
        )
    before = shrunk = comm.world
    found, whole = None, False
    note(comm.ranks, "going on without a rank that has died")
    while not whole:
        leave(comm)
        comm.forget()
        with blocked:
            shrunk = shrunk.Shrink()
        try:
            with blocked:
                alone = shrunk.Dup()
            comm.settle(alone)
            found, fine = exchange(), True
        except Exception as error:
            if not is_loss(comm, error):
                raise
            leave(comm)
            fine = False
        whole = _agree(comm.mpi, shrunk, fine)
    gone = _missing(comm.mpi, before, shrunk)
    comm.losses += len(gone)
    comm.meetings = comm.losses << 32  # some had come to one to which others had not
    if comm.rank == 0:
        progress = say_progress()
        where = f" ({progress})" if progress else ""
        _log.warning(
            f"keras_dist: {have(gone)} died{where}. {comm.size} of {before.Get_size()} ranks go "
            "on, numbered anew in their order."
        )
    return found


def _agree(mpi: Any, world: Any, fine: bool) -> bool:
    try:
        with also_blocked():
            return bool(world.Agree(fine and not _knows_of_dead(world)))
    except mpi.Exception:
        return False


def _knows_of_dead(world: Any) -> bool:
    dead = world.Get_failed()
    count = dead.Get_size()
    dead.Free()
    return bool(count) or world.Is_revoked()


def _missing(mpi: Any, before: Any, after: Any) -> list[int]:
    """Returns the ranks of a communicator that are not in another one."""
    old, new = before.Get_group(), after.Get_group()
    places = old.Translate_ranks(None, new)
    old.Free()
    new.Free()
    return [rank for rank, place in enumerate(places) if place == mpi.UNDEFINED]
