"""allgather: the arrays of all ranks, one behind the other."""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous, telling
from keras_dist._engine.collectives.rows import check_rows, gather_rows
from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried

__all__ = ["allgather", "grouped_allgather"]


def allgather(
    comm: Communicator, array: np.ndarray, name: str, key: str | None = None
) -> np.ndarray:
    """Joins the arrays of all ranks along their first dimension. Collective; blocks.

    Args:
        comm: the ranks.
        array: this rank's array; its first dimension may differ from rank to rank.
        name: what it is called in messages.
        key: a name under which the ranks must meet; `None` for none.

    Returns:
        A new array: the rows of rank 0, then of rank 1, and so on.

    Raises:
        ArgumentError: the array has no dimension.
        ArgumentTypeError: it holds Python objects.
        MismatchError: the other dimensions or the dtypes differ.
    """
    return grouped_allgather(comm, [array], [name], key)[0]


@by_name
@retried
def grouped_allgather(
    comm: Communicator, arrays: Sequence[np.ndarray], names: Sequence[str], key: str | None = None
) -> list[np.ndarray]:
    """Does `allgather` for a list of arrays, in one message. Collective; blocks.

    Args:
        comm: the ranks.
        arrays: this rank's arrays.
        names: what they are called in messages.
        key: a name under which the ranks must meet; `None` for none.

    Returns:
        A new array for each.

    Raises:
        ArgumentError: an array has no dimension.
        ArgumentTypeError: one holds Python objects.
        MismatchError: the other dimensions or the dtypes differ.
    """
    with telling(comm, "allgather", key):
        for name, array in zip(names, arrays, strict=True):
            check_rows(comm, array, name, "to gather along")
    entries = tuple(
        Entry(name, (-1, *array.shape[1:]), str(array.dtype))
        for name, array in zip(names, arrays, strict=True)
    )
    with comm.lock:
        rendezvous(comm, CollectiveSignature("allgather", entries, key=key))
        if not arrays:
            return []
        mine = np.array([len(array) for array in arrays], np.int64)
        told = comm.allgather_bytes(mine.tobytes())
        lengths = [raw.view(np.int64).tolist() for raw in told]
        return gather_rows(comm, arrays, lengths)
