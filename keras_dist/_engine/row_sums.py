"""Sums of the rows of equal index. Pure numpy, independent of MPI.

The indices are sorted once. The first rows of all indices are then gathered at once, the second
rows added at once, and so on: the rows of an index are added in their order, as one by one, so the
bits are those of `numpy.add.at`. It works on blocks that the cache of a core holds.
"""

from collections.abc import Callable

import numpy as np

BLOCK_NBYTES = 512 * 1024
MOST_TURNS = 1024  # rows of an index that are added together with those of others
MOST_RUNS = 64  # ascending runs of indices that are merged, as those of the ranks


class RowGroups:
    """The rows of equal index.

    Args:
        indices: integers of shape (number of rows,): the index of each row.

    Attributes:
        indices: the unique indices, ascending.
    """

    def __init__(self, indices: np.ndarray, places: np.ndarray | None = None):
        order = _sort(indices)
        ascending = indices[order]
        is_first = np.ones(len(ascending), np.bool_)
        np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
        self._starts = np.flatnonzero(is_first)
        self._ends = np.append(self._starts[1:], len(ascending))
        self._order = order if places is None else places[order]
        self.indices = ascending[self._starts]

    def __len__(self) -> int:
        """Returns the number of unique indices."""
        return len(self.indices)

    def sum_rows(
        self,
        rows: np.ndarray,
        sums: np.ndarray,
        finish: Callable[[np.ndarray, slice], None] = lambda block, part: None,
    ) -> None:
        """Adds up the rows of each index, in their order.

        Args:
            rows: array of shape (number of rows, width).
            sums: array of shape (number of unique indices, width) and the dtype of `rows`, written;
                or a block of at least `block_length` rows, used for all blocks in turn.
        """
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
        """Adds the second and further rows of indices to a block."""
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
    """Returns how many rows of each index to add together with those of other indices.

    The further rows of an index are added together. A turn and an index take similar times.
    """
    numbers = np.bincount(np.minimum(counts, MOST_TURNS + 1), minlength=2)
    # By number of turns: the indices that have more rows.
    longer = len(counts) - np.cumsum(numbers)[: MOST_TURNS + 1]
    return max(1, int(np.argmin(np.arange(len(longer)) + longer)))


def _add_in_order(total: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """Adds many rows to one."""
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
