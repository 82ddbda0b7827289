"""Sparse reductions: rows of a table, such as the gradient of an embedding."""

import functools
import math
from collections.abc import Callable, Sequence
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
from keras_dist._engine.collectives.rendezvous import by_name, exchange_or_raise, rendezvous
from keras_dist._engine.collectives.rows import Rows, check_rows, exchange_rows_of_nodes
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import Entry, OpOptions
from keras_dist._engine.tracing import spans

BLOCK_NBYTES = 512 * 1024
MOST_TURNS = 1024  # rows of an index that are added together with those of others
MOST_RUNS = 64  # ascending runs of indices that are merged, as those of the ranks


class RowGroups:
    """The rows of equal index, to be added up.

    The indices are sorted once. The first rows of all indices are then gathered at once, the second
    rows added at once, and so on: the rows of an index are added in their order, as one by one, so
    the bits are those of `numpy.add.at`. It works on blocks that the cache of a core holds.
    """

    def __init__(self, indices: np.ndarray, places: np.ndarray | None = None):
        order = _sort(indices)
        ascending = indices[order]
        is_first = np.ones(len(ascending), np.bool_)
        np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
        self._starts = np.flatnonzero(is_first)
        self._ends = np.append(self._starts[1:], len(ascending))
        self._order = order if places is None else places[order]
        self.indices = ascending[self._starts]  # unique, ascending

    def __len__(self) -> int:
        return len(self.indices)

    def sum_rows(
        self,
        rows: np.ndarray,
        sums: np.ndarray,
        finish: Callable[[np.ndarray, slice], None] = lambda block, part: None,
    ) -> None:
        """Adds up the rows of each index, in order, into `sums` of all or of a block in turn."""
        step = self.block_length(rows)
        firsts = self._order[self._starts]
        repeated = np.flatnonzero(self._ends - self._starts > 1)
        bounds = np.searchsorted(repeated, np.arange(0, len(self) + step, step))
        in_turn = len(sums) < len(self)
        for number, low in enumerate(range(0, len(self), step)):
            part = slice(low, min(low + step, len(self)))
            block = sums[: part.stop - low] if in_turn else sums[part]
            # "clip" writes to `out` directly; all places are valid.
            np.take(rows, firsts[part], axis=0, out=block, mode="clip")
            self._add_further(rows, block, low, repeated[bounds[number] : bounds[number + 1]])
            finish(block, part)

    def block_length(self, rows: np.ndarray) -> int:
        """Returns the number of rows in a block; at most that of the sums, and at least 1."""
        most = BLOCK_NBYTES // max(1, rows[:1].nbytes)
        return max(1, min(most, len(self)))

    def _add_further(
        self, rows: np.ndarray, block: np.ndarray, low: int, repeated: np.ndarray
    ) -> None:
        counts = self._ends[repeated] - self._starts[repeated]
        turns = _turns(counts)
        for turn in range(1, turns):
            active = repeated[counts > turn]
            more = rows.take(self._order[self._starts[active] + turn], axis=0)
            if len(active) == len(block):
                block += more
            else:
                block[active - low] += more
        for index in repeated[counts > turns].tolist():
            places = self._order[self._starts[index] + turns : self._ends[index]]
            _add_in_order(block[index - low], rows, places)


def _turns(counts: np.ndarray) -> int:
    """Returns how many rows of each index to add together with those of other indices."""
    # The further rows of an index are added together. A turn and an index take similar times.
    numbers = np.bincount(np.minimum(counts, MOST_TURNS + 1), minlength=2)
    # By number of turns: the indices that have more rows.
    longer = len(counts) - np.cumsum(numbers)[: MOST_TURNS + 1]
    return max(1, int(np.argmin(np.arange(len(longer)) + longer)))


def _add_in_order(total: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    step = max(1, BLOCK_NBYTES // max(1, total.nbytes))
    part = np.empty((min(step, len(places)) + 1, *total.shape), total.dtype)
    for low in range(0, len(places), step):
        now = places[low : low + step]
        part[0] = total
        np.take(rows, now, axis=0, out=part[1 : len(now) + 1], mode="clip")
        if total.size == 1:  # numpy would add them pairwise
            total[...] = np.add.accumulate(part[: len(now) + 1], axis=0)[-1]
        else:
            np.add.reduce(part[: len(now) + 1], axis=0, out=total)


def _sort(indices: np.ndarray) -> np.ndarray:
    """Returns the places of the indices in ascending order; equal ones keep their order."""
    falls = np.count_nonzero(indices[1:] < indices[:-1])
    if falls < MOST_RUNS:
        return np.argsort(indices, kind="stable")  # numpy merges ascending runs
    low, high = int(indices.min()), int(indices.max())
    if high - low >= 2**32:
        return np.argsort(indices, kind="stable")
    # numpy sorts 16 bits by their value, without comparisons: first the lower half, then the upper.
    above = indices.astype(np.uint64) - np.uint64(low % 2**64)
    order = np.argsort(above.astype(np.uint16), kind="stable")
    if high - low >= 2**16:
        upper = (above >> np.uint64(16)).astype(np.uint16)
        order = order[np.argsort(upper[order], kind="stable")]
    return order


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
    """Sums or averages rows that have an index. Collective: every rank; blocks."""
    # Rows of equal index are added up: those of a rank in their order, then those of the ranks in
    # rank order. An average divides by the number of ranks, as that of a dense gradient does, not
    # by the number of ranks that have the row; ranks that have joined do not count.
    op = options.op
    entries = (
        Entry(name, (-1, *values.shape[1:]), str(values.dtype)),
        Entry(f"the indices of {name}", (-1,), str(indices.dtype)),
    )
    mine: Any
    try:
        _check(comm, values, indices, op, name)
        mine = contribution(values, indices, op, adds_up=comm.size > 1)
    except errors.KerasDistError as error:
        mine = error
    failed = isinstance(mine, errors.KerasDistError)
    with comm.lock:
        call = options.signature("sparse_allreduce", entries=entries, spares=True)
        rendezvous(comm, call, notices)
        # Gradients of several tables are held at the same time.
        table = name if notices else None
        if comm.faults.joined is not None:
            parts = exchange_among(comm, mine if failed else (mine.array(), mine.numbers))
            rows, numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
            gathered = rows, numbers, None
            sums, found = _sum(comm, gathered, op, values.dtype, len(parts), table)
        else:
            lengths = exchange_or_raise(comm, mine if failed else len(mine))
            sums, found = sum_over_ranks(comm, mine, lengths, op, values.dtype, table)
    return sums.reshape(len(found), *values.shape[1:]), found


def sum_over_ranks(
    comm: Communicator,
    mine: Rows,
    lengths: Sequence[int],
    op: ReduceOp,
    dtype: np.dtype,
    table: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums or averages the rows of all ranks. Collective: every rank, after a rendezvous; blocks.

    Returns the sums, shape (number of indices, width), in memory of `table`, and their indices.
    """
    gathered = exchange_rows_of_nodes(comm, mine, lengths)
    return _sum(comm, gathered, op, dtype, comm.size, table)


def _sum(
    comm: Communicator,
    gathered: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    op: ReduceOp,
    dtype: np.dtype,
    count: int,
    table: str | None,
) -> tuple[np.ndarray, np.ndarray]:
    rows, numbers, places = gathered
    groups = RowGroups(numbers, places)
    sums = comm.row_memory.result(table, (len(groups), rows.shape[1]), dtype)
    with spans.phase("reduce"):
        _reduce(groups, rows, sums, op, count)
    return sums, groups.indices


def contribution(values: np.ndarray, indices: np.ndarray, op: ReduceOp, adds_up: bool) -> Rows:
    """Returns the rows of this rank, those of equal index added up, in the dtype of sums."""
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
