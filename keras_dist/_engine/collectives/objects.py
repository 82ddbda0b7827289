"""Python objects between the ranks, pickled. Only ranks of this job are ever unpickled."""

import pickle
from typing import Any

from keras_dist import errors
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import raise_on_all, rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.messages import as_message
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import CollectiveSignature


@by_name
@retried
def broadcast_object(comm: Communicator, value: Any, root: int, key: str | None = None) -> Any:
    """Returns the root's object on every rank. Collective: every rank; blocks."""
    with raise_on_all(comm, "broadcast_object", key):
        source = comm.index_of_root(root)
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
    """Returns the objects of all ranks, in rank order. Collective: every rank; blocks."""
    with raise_on_all(comm, operation, key):
        payload = pickle.dumps(value)
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, key=key))
        parts = comm.allgather_bytes(payload)
    return [pickle.loads(part.tobytes()) for part in parts]


def exchange_or_raise(comm: Communicator, found: Any) -> list[Any]:
    """Returns the objects of all ranks, in rank order, or raises the error of one of them.

    For checks of data that may fail on one rank alone: all ranks raise, and none waits for
    another. Collective: every rank, after a rendezvous; blocks.
    """
    parts = comm.allgather_bytes(as_message(found))
    objects = [pickle.loads(part.tobytes()) for part in parts]
    for each in objects:
        if isinstance(each, errors.KerasDistError):
            raise each
    return objects
