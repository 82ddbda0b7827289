"""allgather: the arrays of all ranks, concatenated."""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import raise_on_all, rendezvous
from keras_dist._engine.collectives.rows import check_rows, gather_rows
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import CollectiveSignature, entries_of


def allgather(
    comm: Communicator, array: np.ndarray, name: str, key: str | None = None
) -> np.ndarray:
    """Concatenates the arrays of all ranks along the first dimension. Collective; blocks."""
    return grouped_allgather(comm, [array], [name], key)[0]


@by_name
@retried
def grouped_allgather(
    comm: Communicator, arrays: Sequence[np.ndarray], names: Sequence[str], key: str | None = None
) -> list[np.ndarray]:
    """Concatenates each array of a list, as `allgather`, in one message. Collective; blocks."""
    with raise_on_all(comm, "allgather", key):
        for name, array in zip(names, arrays, strict=True):
            check_rows(comm, array, name, "to gather along")
    specs = [((-1, *array.shape[1:]), array.dtype) for array in arrays]
    with comm.lock:
        rendezvous(comm, CollectiveSignature("allgather", entries_of(names, specs), key=key))
        if not arrays:
            return []
        mine = np.array([len(array) for array in arrays], np.int64)
        lengths = [raw.view(np.int64).tolist() for raw in comm.allgather_bytes(mine.tobytes())]
        return gather_rows(comm, arrays, lengths)
