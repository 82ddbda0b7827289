"""alltoall: each rank sends some of its rows to each rank."""

from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.objects import exchange_or_raise
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.rows import check_rows, exchange_bytes
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import as_bytes
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import CollectiveSignature, Entry


@by_name
@retried
def alltoall(
    comm: Communicator, array: np.ndarray, splits: Any, name: str, key: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sends the first rows to rank 0, the next to rank 1, and so on. Collective; blocks.

    Returns:
        New array: the rows from rank 0, then from rank 1, and so on; and the number of rows from
        each rank, int64 of shape (number of ranks,).
    """
    rest = array.shape[1:]
    entry = Entry(name, (-1, *rest), str(array.dtype))
    with comm.lock:
        rendezvous(comm, CollectiveSignature("alltoall", (entry,), key=key))
        table = _allgather_splits(comm, array, splits, name)
        width = array.itemsize * int(np.prod(rest))
        received = table[:, comm.rank].copy()
        flat = exchange_bytes(comm, as_bytes(array), table * width)
    return flat.view(array.dtype).reshape((int(received.sum()), *rest)), received


def _allgather_splits(comm: Communicator, array: np.ndarray, splits: Any, name: str) -> np.ndarray:
    """Returns the number of rows that each rank (first axis) sends to each rank.

    Splits may depend on data, so they may be wrong on one rank alone.
    """
    mine: Any
    try:
        check_rows(comm, array, name, "to split along")
        mine = _parse_splits(comm, len(array), splits, name).tolist()
    except errors.KerasDistError as error:
        mine = error
    return np.array(exchange_or_raise(comm, mine), np.int64)


def _parse_splits(comm: Communicator, rows: int, splits: Any, name: str) -> np.ndarray:
    size = comm.size
    if splits is None:
        if rows % size:
            raise _bad_splits(
                comm, f"the rows of {name} to be a multiple of {size}", f"{rows} rows"
            )
        return np.full(size, rows // size)
    try:
        counts = np.asarray(splits)
    except Exception as error:  # the other ranks wait for the outcome
        raise _bad_splits(comm, "splits to be a list of integers", repr(error)) from error
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (size,):
        received = f"shape {counts.shape} and dtype {counts.dtype}"
        raise _bad_splits(comm, f"splits to be {size} integers, one for each rank", received)
    if counts.min() < 0 or sum(counts.tolist()) > rows:
        expected = f"splits of {name} to be at least 0 each, and {rows} together at most"
        raise _bad_splits(comm, expected, f"{counts.tolist()}")
    return counts


def _bad_splits(comm: Communicator, expected: str, received: str) -> errors.ArgumentError:
    remedy = "Pass splits, a list of the number of rows for each rank."
    return errors.ArgumentError(comm.where(), expected, received, remedy)
