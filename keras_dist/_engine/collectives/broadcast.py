"""broadcast: the root's arrays on every rank."""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous, telling
from keras_dist._engine.collectives.rows import check_numbers
from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried
from keras_dist._engine.mpi.transfer import as_bytes, broadcast_bytes

__all__ = ["broadcast", "broadcast_into"]


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
) -> list[np.ndarray]:
    """Copies the root's arrays to every rank. Collective: every rank; blocks.

    Args:
        comm: the ranks.
        arrays: this rank's arrays; shapes and dtypes must agree over the ranks.
        names: what they are called in messages.
        root: the rank of the job whose values all ranks receive.
        operation: what the call is called in messages.
        key: a name under which the ranks must meet; `None` for none.
        remedy: what a user should do when the ranks differ.

    Returns:
        New arrays that hold the root's values.

    Raises:
        ArgumentError: `root` is not one of the ranks.
        ArgumentTypeError: an array holds Python objects.
        MismatchError: the ranks differ.
    """
    with telling(comm, operation, key):
        source = comm.place_of_root(root)
        for name, array in zip(names, arrays, strict=True):
            check_numbers(comm, array, name, "broadcast_object")
    entries = _entries(names, arrays)
    with comm.lock:
        rendezvous(
            comm, CollectiveSignature(operation, entries, root=int(root), key=key, remedy=remedy)
        )
        copies = [np.array(array, order="C") for array in arrays]
        _send(comm, copies, source)
    return copies


def broadcast_into(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    root: int,
    key: str | None = None,
) -> None:
    """Writes the root's values into the arrays of every rank. Collective: every rank; blocks.

    Args:
        comm: the ranks.
        arrays: this rank's arrays, writeable; shapes and dtypes must agree over the ranks.
        names: what they are called in messages.
        root: the rank of the job whose values all ranks receive.
        key: a name under which the ranks must meet; `None` for none.

    Raises:
        ArgumentError: `root` is not one of the ranks.
        MismatchError: the ranks differ.
    """
    received = _broadcast_into(comm, arrays, names, root, key)
    for array, buffer in zip(arrays, received, strict=True):
        if buffer is not array:
            array[...] = buffer


@by_name
@retried
def _broadcast_into(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    root: int,
    key: str | None,
) -> list[np.ndarray]:
    with telling(comm, "broadcast_", key):
        source = comm.place_of_root(root)
    entries = _entries(names, arrays)
    with comm.lock:
        rendezvous(comm, CollectiveSignature("broadcast_", entries, root=int(root), key=key))
        # What lies in one piece is received where it lies, unless it may be needed once more.
        in_place = comm.recovery is None
        buffers = [
            array if in_place and array.flags.c_contiguous else np.array(array, order="C")
            for array in arrays
        ]
        _send(comm, buffers, source)
    return buffers


def _entries(names: Sequence[str], arrays: Sequence[np.ndarray]) -> tuple[Entry, ...]:
    pairs = zip(names, arrays, strict=True)
    return tuple(Entry(name, array.shape, str(array.dtype)) for name, array in pairs)


def _send(comm: Communicator, arrays: Sequence[np.ndarray], source: int) -> None:
    """Sends contiguous arrays of the root, by its place in `comm`, into those of the others."""
    if comm.size > 1:
        for array in arrays:
            broadcast_bytes(comm.world, as_bytes(array), source)
