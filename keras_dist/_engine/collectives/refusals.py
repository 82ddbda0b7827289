"""Refused names: a rank refused an operation because one of that name was in flight.

Whether an earlier operation has ended when a script calls another one of its name depends on
timing: it may have ended on one rank and not on another. So a rank that has refused an operation
says so at its next rendezvous. Ranks that wait there for the refused operation raise the error as
well, and this rank repeats its own rendezvous. If no rank waits for it, nothing happens.
"""

from collections.abc import Sequence

from keras_dist import errors
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.ordering.queue import HeldNames
from keras_dist._engine.ordering.ticket import Reordered, in_flight
from keras_dist._engine.signature import CollectiveSignature


class RepeatRendezvous(Exception):
    """This rank must repeat the rendezvous: others have left it with an error."""


def resolve_refused(
    comm: Communicator, calls: Sequence[CollectiveSignature], held: Sequence[HeldNames]
) -> None:
    """Settles operations that some ranks have refused.

    Collective: every rank of `comm`, within a rendezvous. Returns if no rank waits for one.
    """
    names = [[name for name in each.names if name is not None] for each in held]
    for name in sorted({name for call in calls for name in call.refused}):
        others = [index for index, call in enumerate(calls) if name not in call.refused]
        waits = [name in names[index] and calls[index].key in names[index] for index in others]
        if not others or not all(waits):
            comm.order.forget_refused(name)
            continue
        called = all(calls[index].key == name for index in others)
        if comm.rank not in others:
            if called:
                comm.order.forget_refused(name)
            raise RepeatRendezvous
        if not called:
            raise Reordered(name)
        first = next(index for index in range(comm.size) if index not in others)
        where = f"[rank {comm.ranks[first]} of {comm.job.size}]"
        raise errors.ArgumentError(in_flight(where, name))
