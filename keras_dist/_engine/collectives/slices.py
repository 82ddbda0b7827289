"""Rows of a table: the gradient of an embedding, of which each rank holds a few rows."""

from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import (
    ReduceOp,
    accumulator,
    check_dtype,
    check_sum,
    divide,
    halves,
    mean_of_halves,
    needs_halves,
)
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.objects import exchange_or_raise
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.rows import check_rows, gather_rows
from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried

__all__ = ["reduce_slices"]


@by_name
@retried
def reduce_slices(
    comm: Communicator,
    values: np.ndarray,
    indices: np.ndarray,
    op: ReduceOp,
    name: str,
    key: str | None = None,
    tells: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums or averages rows that carry their index. Collective: every rank; blocks.

    A row that several ranks hold, or one rank several times, comes out once; rows of a rank
    are added up in their order, then the ranks in theirs, so the bits are the same
    everywhere. An average divides by the number of ranks, as that of the dense gradient
    does, not by the number of ranks that hold the row; ranks that have joined do not count.

    Args:
        comm: the ranks.
        values: this rank's rows, shape (count, ...); `count` may differ from rank to rank.
        indices: the index of each row, shape (count,), whole numbers.
        op: `ReduceOp.SUM` or `ReduceOp.AVERAGE`.
        name: what the table is called in messages.
        key: a name under which the ranks must meet; `None` for none.
        tells: see `rendezvous`.

    Returns:
        The rows and their indices, new, each index once, in ascending order.

    Raises:
        ArgumentError: `values` is a scalar, `indices` do not fit it, or `op` is another one;
            raised on every rank, whichever rank brought it.
        ArgumentTypeError: `indices` are no whole numbers, or `op` is not defined for the
            dtype of `values`; raised on every rank, whichever rank brought it.
        MismatchError: the other dimensions, the dtypes or the ops differ.
    """
    entries = (
        Entry(name, (-1, *values.shape[1:]), str(values.dtype)),
        Entry(f"the indices of {name}", (-1,), str(indices.dtype)),
    )
    mine: Any
    try:
        _check(comm, values, indices, op, name)
        rows, places = _brought(values, indices, op)
        mine = (len(rows), len(rows))
    except errors.KerasDistError as error:
        mine = error
    with comm.lock:
        rendezvous(
            comm,
            CollectiveSignature("sparse_allreduce", entries, op=op.value, key=key, spares=True),
            tells,
        )
        if comm.absence is not None:
            brought = mine if isinstance(mine, errors.KerasDistError) else (rows, places)
            parts = exchange_among(comm, brought)
            rows, places = (np.concatenate(each) for each in zip(*parts, strict=True))
            return _finish(rows, places, op, values.dtype, len(parts))
        lengths = exchange_or_raise(comm, mine)
        rows, places = gather_rows(comm, [rows, places], lengths)
    return _finish(rows, places, op, values.dtype, comm.size)


def _finish(
    rows: np.ndarray, places: np.ndarray, op: ReduceOp, dtype: np.dtype, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of all ranks, of which there are `count`."""
    if needs_halves(dtype, op):
        (high, where), (low, _) = (_add_up(half, places, op) for half in halves(rows))
        return mean_of_halves(high, low, count), where
    total, places = _add_up(rows, places, op)
    if op is ReduceOp.AVERAGE and count > 1:
        divide(total, count)
    return total.astype(dtype, copy=False), places


def _check(
    comm: Communicator, values: np.ndarray, indices: np.ndarray, op: ReduceOp, name: str
) -> None:
    check_sum(op, comm.where(), "sparse_allreduce", "Make dense arrays for others: allreduce.")
    check_dtype(values.dtype, op, comm.where(), name)
    check_rows(comm, values, name, "each with its index")
    if not np.issubdtype(indices.dtype, np.integer):
        expected = f"the indices of {name} to be whole numbers"
        raise errors.ArgumentTypeError(
            errors.explain(
                comm.where(), expected, f"dtype {indices.dtype}", "Cast them, for example to int64."
            )
        )
    if indices.shape != values.shape[:1]:
        expected = f"the indices of {name} to have shape {values.shape[:1]}, one for each row"
        raise errors.ArgumentError(
            errors.explain(
                comm.where(), expected, f"shape {indices.shape}", "Pass one index for each row."
            )
        )


def _brought(
    values: np.ndarray, indices: np.ndarray, op: ReduceOp
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a rank brings: its rows of each index as one, where one holds their sum."""
    if needs_halves(values.dtype, op):
        return values, indices
    return _add_up(values, indices, op)


def _add_up(values: np.ndarray, indices: np.ndarray, op: ReduceOp) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of each index, in the dtype in which `op` combines them."""
    places, inverse = np.unique(indices, return_inverse=True)
    wide = accumulator(values.dtype, op)
    total = np.zeros((len(places), *values.shape[1:]), wide)
    # Infinities and overflow are the caller's to judge: they travel to every rank alike.
    with np.errstate(all="ignore"):
        np.add.at(total, inverse.reshape(-1), values.astype(wide, copy=False))
    return total, places
