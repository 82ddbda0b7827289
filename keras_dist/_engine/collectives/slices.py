"""Rows of a table: the gradient of an embedding, of which each rank holds a few rows."""

import numpy as np

from keras_dist._engine.collectives.allgather import allgather
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.reduce import ReduceOp, check_dtype

__all__ = ["reduce_slices"]


def reduce_slices(
    comm: Communicator, values: np.ndarray, indices: np.ndarray, op: ReduceOp, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Sums or averages rows that carry their index. Collective: every rank; blocks.

    A row that several ranks hold, or one rank several times, comes out once; rows of a rank
    are added up in their order, then the ranks in theirs, so the bits are the same
    everywhere. An average divides by the number of ranks, as that of the dense gradient
    does, not by the number of ranks that hold the row.

    Args:
        comm: the ranks.
        values: this rank's rows, shape (count, ...); `count` may differ from rank to rank.
        indices: the index of each row, shape (count,), whole numbers.
        op: `ReduceOp.SUM` or `ReduceOp.AVERAGE`.
        name: what the table is called in messages.

    Returns:
        The rows and their indices, each index once, in ascending order.
    """
    check_dtype(values.dtype, op, comm.where(), name)
    rows, places = _add_up(values, indices)
    with comm.lock:
        all_rows = allgather(comm, rows, name)
        all_places = allgather(comm, places, f"the indices of {name}")
    total, places = _add_up(all_rows, all_places)
    if op is ReduceOp.AVERAGE and comm.size > 1:
        total /= total.dtype.type(comm.size)
    return total.astype(values.dtype, copy=False), places


def _add_up(values: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of each index, in float32 where they are narrower."""
    places, inverse = np.unique(indices, return_inverse=True)
    wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
    total = np.zeros((len(places), *values.shape[1:]), wide)
    np.add.at(total, inverse.reshape(-1), values.astype(wide, copy=False))
    return total, places
