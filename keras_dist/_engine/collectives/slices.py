"""Sparse reductions: rows of a table, such as the gradient of an embedding."""

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
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.options import OpOptions
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import Entry

__all__ = ["reduce_slices"]


@by_name
@retried
def reduce_slices(
    comm: Communicator,
    values: np.ndarray,
    indices: np.ndarray,
    name: str,
    options: OpOptions,
    notices: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums or averages rows that have an index. Collective: every rank; blocks.

    Rows of equal index are added up: those of a rank in their order, then those of the ranks in
    rank order, so the bits are equal on all ranks. An average divides by the number of ranks, as
    that of a dense gradient does, not by the number of ranks that have the row; ranks that have
    joined do not count.

    Args:
        comm: the ranks.
        values: rows of this rank, shape (count, ...); `count` may differ from rank to rank.
        indices: integers of shape (count,), the index of each row.
        name: name of the table in messages.
        options: the reduction: a sum or an average, without factors.
        notices: see `rendezvous`.

    Returns:
        New arrays: the rows, and their indices, unique and ascending.

    Raises:
        ArgumentError: `values` is a scalar, `indices` does not fit it, or the reduction is another
            one; raised on every rank, whichever rank passed it.
        ArgumentTypeError: `indices` are not integers, or the reduction is not defined for the
            dtype of `values`; raised on every rank, whichever rank passed it.
        MismatchError: the other dimensions, the dtypes or the reductions differ.
    """
    op = options.op
    entries = (
        Entry(name, (-1, *values.shape[1:]), str(values.dtype)),
        Entry(f"the indices of {name}", (-1,), str(indices.dtype)),
    )
    mine: Any
    try:
        _check(comm, values, indices, op, name)
        rows, row_numbers = _contribution(values, indices, op)
        mine = (len(rows), len(rows))
    except errors.KerasDistError as error:
        mine = error
    failed = isinstance(mine, errors.KerasDistError)
    with comm.lock:
        call = options.signature("sparse_allreduce", entries=entries, spares=True)
        rendezvous(comm, call, notices)
        if comm.faults.joined is not None:
            parts = exchange_among(comm, mine if failed else (rows, row_numbers))
            rows, row_numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
            return _finish(rows, row_numbers, op, values.dtype, len(parts))
        lengths = exchange_or_raise(comm, mine)
        rows, row_numbers = gather_rows(comm, [rows, row_numbers], lengths)
    return _finish(rows, row_numbers, op, values.dtype, comm.size)


def _finish(
    rows: np.ndarray, row_numbers: np.ndarray, op: ReduceOp, dtype: np.dtype, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reduces the rows of `count` ranks."""
    if needs_halves(dtype, op):
        (high, where), (low, _) = (_add_up(half, row_numbers, op) for half in halves(rows))
        return mean_of_halves(high, low, count), where
    total, row_numbers = _add_up(rows, row_numbers, op)
    if op is ReduceOp.AVERAGE and count > 1:
        divide(total, count)
    return total.astype(dtype, copy=False), row_numbers


def _check(
    comm: Communicator, values: np.ndarray, indices: np.ndarray, op: ReduceOp, name: str
) -> None:
    check_sum(
        op, comm.where(), "sparse_allreduce", "For others, make dense arrays and use allreduce."
    )
    check_dtype(values.dtype, op, comm.where(), name)
    check_rows(comm, values, name, "each with its index")
    if not np.issubdtype(indices.dtype, np.integer):
        expected = f"the indices of {name} to be integers"
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


def _contribution(
    values: np.ndarray, indices: np.ndarray, op: ReduceOp
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a rank: those of equal index are added up, if a row can hold the sum."""
    if needs_halves(values.dtype, op):
        return values, indices
    return _add_up(values, indices, op)


def _add_up(values: np.ndarray, indices: np.ndarray, op: ReduceOp) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of each index, in the dtype of the accumulator."""
    row_numbers, inverse = np.unique(indices, return_inverse=True)
    wide = accumulator(values.dtype, op)
    total = np.zeros((len(row_numbers), *values.shape[1:]), wide)
    # Infinities and overflow are the caller's to judge: they reach every rank alike.
    with np.errstate(all="ignore"):
        np.add.at(total, inverse.reshape(-1), values.astype(wide, copy=False))
    return total, row_numbers
