"""broadcast: the root's arrays on every rank; objects of ranks, pickled.

Nothing is unpickled but what ranks of this job have sent.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.collectives.rendezvous import by_name, raise_on_all, rendezvous
from keras_dist._engine.collectives.rows import check_numbers
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import as_bytes, broadcast_bytes
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import CollectiveSignature, entries_of_arrays


@by_name
@retried
def broadcast(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    root: int,
    operation: str = "broadcast",
    key: str | None = None,
    remedy: str = CollectiveSignature.remedy,
    in_place: bool = False,
) -> list[np.ndarray]:
    """Copies the root's arrays to every rank; where they lie, if `in_place`. Collective; blocks."""
    with raise_on_all(comm, operation, key):
        source = comm.index_of_root(root)
        for name, array in zip(names, arrays, strict=True):
            check_numbers(comm, array, name, "broadcast_object")
    entries = entries_of_arrays(names, arrays)
    call = CollectiveSignature(operation, entries, root=int(root), key=key, remedy=remedy)
    with comm.lock:
        rendezvous(comm, call)
        in_place = in_place and comm.faults.retry is None  # otherwise it may have to be repeated
        received = [
            array if in_place and array.flags.c_contiguous else np.array(array, order="C")
            for array in arrays
        ]
        for array in received if comm.size > 1 else ():
            broadcast_bytes(comm.world, as_bytes(array), source)
    return received


def broadcast_into(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    root: int,
    key: str | None = None,
) -> None:
    """Writes the root's values into the arrays of every rank. Collective: every rank; blocks."""
    received = broadcast(comm, arrays, names, root, "broadcast_", key, in_place=True)
    for array, buffer in zip(arrays, received, strict=True):
        if buffer is not array:
            array[...] = buffer


@by_name
@retried
def broadcast_object(comm: Communicator, value: Any, root: int, key: str | None = None) -> Any:
    """Returns the root's object on every rank. Collective: every rank; blocks."""
    with raise_on_all(comm, "broadcast_object", key):
        source = comm.index_of_root(root)
        payload = _pickled(comm, value) if comm.rank == source else b""
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
        payload = _pickled(comm, value)
    with comm.lock:
        rendezvous(comm, CollectiveSignature(operation, key=key))
        parts = comm.allgather_bytes(payload)
    return [pickle.loads(part.tobytes()) for part in parts]


def _pickled(comm: Communicator, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # of a user's class
        raise errors.ArgumentError(
            comm.where(),
            "an object that can be pickled",
            f"{type(value).__name__} ({type(error).__name__}: {error})",
            "A lambda, and what is defined within a function, cannot: define functions and "
            "classes at the top level of a module.",
        ) from error
