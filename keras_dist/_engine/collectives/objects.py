"""Python objects between the ranks, pickled. Only ranks of this job are ever unpickled."""

import pickle
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous, telling
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried

__all__ = ["allgather_object", "broadcast_object", "exchange_or_raise"]


@by_name
@retried
def broadcast_object(comm: Communicator, value: Any, root: int, key: str | None = None) -> Any:
    """Returns the root's object on every rank. Collective: every rank; blocks.

    Args:
        comm: the ranks.
        value: the object; only the root's counts, others may pass anything.
        root: the rank of the job whose object all ranks receive.
        key: a name under which the ranks must meet; `None` for none.

    Raises:
        ArgumentError: `root` is not one of the ranks, or its object cannot be pickled; raised on
            every rank.
        MismatchError: the ranks differ in operation, root or key.
    """
    with telling(comm, "broadcast_object", key):
        source = comm.place_of_root(root)
        payload = pickle.dumps(value) if comm.rank == source else b""
    with comm.lock:
        rendezvous(comm, CollectiveSignature("broadcast_object", root=int(root), key=key))
        parts = comm.allgather_bytes(payload)
    return value if comm.rank == source else pickle.loads(parts[source].tobytes())


@by_name
@retried
def allgather_object(
    comm: Communicator, value: Any, key: str | None = None, operation: str = "allgather_object"
) -> list[Any]:
    """Returns the objects of all ranks, in rank order. Collective: every rank; blocks.

    Args:
        comm: the ranks.
        value: this rank's object.
        key: a name under which the ranks must meet; `None` for none.
        operation: what the call is called in messages.

    Raises:
        ArgumentError: an object cannot be pickled; raised on every rank.
        MismatchError: the ranks differ in operation or key.
    """
    with telling(comm, operation, key):
        payload = pickle.dumps(value)
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, key=key))
        parts = comm.allgather_bytes(payload)
    return [pickle.loads(part.tobytes()) for part in parts]


def exchange_or_raise(comm: Communicator, found: Any) -> list[Any]:
    """Returns what all ranks have found, in rank order, unless one has found an error.

    Data may be wrong on one rank alone. The ranks tell each other, and all raise: none is
    left waiting. Collective: every rank, behind a meeting; blocks.

    Args:
        comm: the ranks.
        found: an object; or a `KerasDistError`, not raised.

    Raises:
        KerasDistError: that of the first rank that has one; raised on every rank.
    """
    parts = comm.allgather_bytes(pickle.dumps(found))
    everything = [pickle.loads(part.tobytes()) for part in parts]
    for each in everything:
        if isinstance(each, errors.KerasDistError):
            raise each
    return everything
