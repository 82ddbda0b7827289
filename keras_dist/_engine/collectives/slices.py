"""Sparse reductions: rows of a table, such as the gradient of an embedding."""

import functools
import math
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
from keras_dist._engine.collectives.row_exchange import Rows, exchange_rows_of_nodes
from keras_dist._engine.collectives.rows import check_rows
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.options import OpOptions
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.row_sums import RowGroups
from keras_dist._engine.signature import Entry
from keras_dist._engine.tracing import spans


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
        values: rows of this rank, shape (count, ...); `count` may differ from rank to rank.
        indices: integers of shape (count,), the index of each row.
    """
    op = options.op
    entries = (
        Entry(name, (-1, *values.shape[1:]), str(values.dtype)),
        Entry(f"the indices of {name}", (-1,), str(indices.dtype)),
    )
    mine: Any
    try:
        _check(comm, values, indices, op, name)
        mine = _contribution(values, indices, op, adds_up=comm.size > 1)
    except errors.KerasDistError as error:
        mine = error
    failed = isinstance(mine, errors.KerasDistError)
    with comm.lock:
        call = options.signature("sparse_allreduce", entries=entries, spares=True)
        rendezvous(comm, call, notices)
        places = None
        if comm.faults.joined is not None:
            parts = exchange_among(comm, mine if failed else (mine.array(), mine.numbers))
            rows, numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
            count = len(parts)
        else:
            lengths = exchange_or_raise(comm, mine if failed else len(mine))
            rows, numbers, places = exchange_rows_of_nodes(comm, mine, lengths)
            count = comm.size
        groups = RowGroups(numbers, places)
        # Gradients of several tables are held at the same time.
        table = name if notices else None
        sums = comm.row_memory.result(table, (len(groups), rows.shape[1]), values.dtype)
        with spans.phase("reduce"):
            _reduce(groups, rows, sums, op, count)
    return sums.reshape(len(groups), *values.shape[1:]), groups.indices


def _contribution(values: np.ndarray, indices: np.ndarray, op: ReduceOp, adds_up: bool) -> Rows:
    """Returns the rows of a rank."""
    halved = needs_halves(values.dtype, op)
    dtype = values.dtype if halved else accumulator(values.dtype, op)
    width = math.prod(values.shape[1:])
    rows = values.reshape(len(values), width).astype(dtype, copy=False)
    if halved or not adds_up:
        return Rows(width, dtype, indices, lambda target: np.copyto(target, rows))
    groups = RowGroups(indices)
    return Rows(width, dtype, groups.indices, functools.partial(_add_up, groups, rows))


def _add_up(groups: RowGroups, rows: np.ndarray, sums: np.ndarray) -> None:
    # Infinities and overflow are the caller's to judge: they reach every rank alike.
    with np.errstate(all="ignore"):
        groups.sum_rows(rows, sums)


def _reduce(
    groups: RowGroups, rows: np.ndarray, results: np.ndarray, op: ReduceOp, count: int
) -> None:
    """Reduces the rows of `count` ranks into an array."""
    if needs_halves(results.dtype, op):
        high, low = np.empty_like(results), np.empty_like(results)
        for half, total in zip(halves(rows), (high, low), strict=True):
            groups.sum_rows(half, total)
        results[...] = mean_of_halves(high, low, count)
        return
    averages, is_narrow = op is ReduceOp.AVERAGE and count > 1, rows.dtype != results.dtype

    def finish(block: np.ndarray, part: slice) -> None:
        np.add(block, 0, out=block)  # -0.0 becomes 0.0, as in a dense gradient
        if averages:
            divide(block, count)
        if is_narrow:
            results[part] = block.astype(results.dtype)

    sums = results
    if is_narrow:
        sums = np.empty((groups.block_length(rows), results.shape[1]), rows.dtype)
    with np.errstate(all="ignore"):
        groups.sum_rows(rows, sums, finish)


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
            comm.where(), expected, f"dtype {indices.dtype}", "Cast them, for example to int64."
        )
    if indices.shape != values.shape[:1]:
        expected = f"the indices of {name} to have shape {values.shape[:1]}, one for each row"
        raise errors.ArgumentError(
            comm.where(), expected, f"shape {indices.shape}", "Pass one index for each row."
        )
