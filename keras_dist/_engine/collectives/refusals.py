"""Names that a rank has refused, as an operation of that name was in flight; how others hear of it.

Whether an earlier operation has ended when a script asks for another of its name is a matter of
time: it may have on one rank and not on another. So a rank that has refused one says so at its next
meeting. Ranks that wait there for the refused operation get the error as well; then this one comes
again, for what it had come for. Where nobody waits for it, nothing is said.
"""

from collections.abc import Sequence

from keras_dist import errors
from keras_dist._engine.collectives.matching import Standing
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.collectives.ticket import Reordered, in_flight
from keras_dist._engine.communicator import Communicator

__all__ = ["MeetAgain", "settle_refused"]


class MeetAgain(Exception):
    """This rank is to come to the same meeting again: others have gone out of it by an error."""


def settle_refused(
    comm: Communicator, calls: Sequence[CollectiveSignature], standing: Sequence[Standing]
) -> None:
    """Lets the ranks agree on what becomes of operations that some of them have refused.

    Collective: every rank of `comm`, behind a meeting; returns where nobody waits for one.

    Args:
        comm: the ranks.
        calls: what each rank has come for, and which names it has refused.
        standing: which names each rank holds; see `Line.standing`.

    Raises:
        ArgumentError: this rank has come for one that others have refused.
        MeetAgain: this rank has refused one for which others had come.
        OtherFirst: others have refused one that this rank holds.
    """
    names = [held for held, _ in standing]
    for name in sorted({name for call in calls for name in call.refused}):
        others = [place for place, call in enumerate(calls) if name not in call.refused]
        waits = [name in names[place] and calls[place].key in names[place] for place in others]
        if not others or not all(waits):
            comm.forget_refused(name)
            continue
        come = all(calls[place].key == name for place in others)
        if comm.rank not in others:
            if come:
                comm.forget_refused(name)
            raise MeetAgain
        if not come:
            raise Reordered(name)
        first = next(place for place in range(comm.size) if place not in others)
        where = f"[rank {comm.ranks[first]} of {comm.job.size}]"
        raise errors.ArgumentError(in_flight(where, name))
