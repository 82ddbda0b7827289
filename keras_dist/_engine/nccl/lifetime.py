"""When ranks make their communicator of NCCL, and when they abandon it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from keras_dist import errors
from keras_dist._engine.nccl.ranks import NcclRanks
from keras_dist._engine.signature import CollectiveSignature

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator


def nccl_of(comm: "Communicator") -> NcclRanks:
    """Returns the ranks in NCCL; `connect` follows. Collective at the first call; blocks."""
    if comm.nccl is None:
        comm.nccl = NcclRanks(comm)
    ranks: NcclRanks = comm.nccl
    return ranks


def abandon(comm: "Communicator", failure: Exception) -> None:
    """Ends the operations on which the ranks have turned out not to agree. Collective; blocks."""
    ranks, comm.nccl, comm.meets_once = comm.nccl, None, False
    if ranks is not None:
        ranks.give_up(failure)


@contextlib.contextmanager
def undoing(comm: "Communicator", calls: Sequence[CollectiveSignature]) -> Iterator[None]:
    """Returns a context that abandons what was launched ahead, if ranks differ or it raises.

    Collective: every rank, with the operations of all ranks; blocks.
    """
    is_ahead = any(call.ahead for call in calls)
    try:
        yield
    except Exception as error:
        if is_ahead:
            abandon(comm, error)
        raise
    if is_ahead and any(call.digest != calls[0].digest for call in calls):
        abandon(comm, errors.RankError(f"{comm.where()} Ranks are out of data."))
