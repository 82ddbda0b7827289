"""Partition of the rows of files into contiguous blocks. Pure index arithmetic.

An epoch is a sequence of blocks in shuffled order. The sequence is divided into windows of one
block each, which are assigned to the ranks in turn; the rest at the end is divided evenly. A rank
reads one window at a time and shuffles its rows. For an order that is independent of the number of
ranks, all ranks read all windows and take every n-th row. The plans of `partition` determine the
number of rows and the sizes of the batches of a rank.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from keras_dist.data.partition import Plan

Pieces = np.ndarray  # int64 of shape (count, 2): first row and end of each piece

WINDOWS = 64  # smallest number of windows of a data set, for a sufficient shuffle


def block_length(total: int, row_nbytes: int, batch_size: int, align: int, nbytes: int) -> int:
    """Returns the default number of rows of a block.

    Args:
        row_nbytes: size of a row in bytes.
        nbytes: largest size of a block in bytes, unless `batch_size` or `align` need more.
    """
    rows = max(batch_size, min(nbytes // max(1, row_nbytes), total // WINDOWS))
    return -(-rows // align) * align


def ordered_blocks(total: int, block: int, align: int, key: Sequence[int] | None) -> Pieces:
    """Returns the blocks of an epoch in order; blocks that are not full come last."""
    random = np.random.default_rng(key) if key is not None else None
    shift = 0 if random is None else int(random.integers(block // align)) * align
    cuts = np.unique(np.concatenate([[0], np.arange(shift, total, block), [total]]))
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1).astype(np.int64)
    if random is None:
        return pieces
    pieces = random.permutation(pieces)
    is_full = pieces[:, 1] - pieces[:, 0] == block
    return np.concatenate([pieces[is_full], pieces[~is_full]])


@dataclasses.dataclass(frozen=True)
class BlockShard:
    """The shard of a rank in an epoch."""

    sequence: Pieces
    block: int
    plan: Plan
    key: tuple[int, ...] | None

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.sequence[:, 1] - self.sequence[:, 0])

    @property
    def total(self) -> int:
        """Number of rows of all ranks."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def rounds(self) -> int:
        """Number of full windows of each rank."""
        return self.total // (self.block * self.plan.size)

    def window_at(self, position: int) -> int:
        """Returns the number of the window of a position."""
        return min(position // self.block, self.rounds)

    def pieces(self, window: int) -> Pieces:
        """Returns the pieces of a window, in the order of the file."""
        rank, size = self.plan.rank, self.plan.size
        if window < self.rounds:
            start = (window * size + rank) * self.block
            return self._cut(start, start + self.block)
        begin = self.rounds * size * self.block
        fewest, more = divmod(self.total - begin, size)
        start = begin + rank * fewest + min(rank, more)
        return self._cut(start, start + fewest + (rank < more))

    def order(self, window: int) -> np.ndarray | None:
        """Returns the order of the rows of a window; `None` keeps the order of the file."""
        pieces = self.pieces(window)
        if self.key is None or not len(pieces):
            return None
        count = int((pieces[:, 1] - pieces[:, 0]).sum())
        return np.random.default_rng([*self.key, int(pieces[0, 0])]).permutation(count)

    def positions(self, step: int) -> list[tuple[int, np.ndarray]]:
        """Returns the windows of a batch, with the positions of its rows in their order."""
        start, stop = self.plan.bounds(step)
        # Rows that are repeated for equal batch sizes are the last row.
        positions = np.minimum(np.arange(start, stop), self.plan.held - 1)
        windows = np.minimum(positions // self.block, self.rounds)
        return [
            (int(window), positions[windows == window] - window * self.block)
            for window in np.unique(windows)
        ]

    def last_window(self, step: int) -> int:
        """Returns the last window that any rank reads in a step."""
        if step < self.plan.steps - 1:
            return self.window_at(self.plan.bounds(step)[1] - 1)
        # No rank has more rows than rank 0.
        fewest, more = divmod(self.total, self.plan.size)
        most = self.plan.count if self.plan.count < fewest else fewest + (more > 0)
        return self.window_at(most - 1)

    def _cut(self, start: int, stop: int) -> Pieces:
        """Returns the pieces between two positions of the sequence, sorted by row."""
        if start >= stop:
            return np.empty((0, 2), np.int64)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        pieces = self.sequence[first : last + 1].copy()
        pieces[-1, 1] -= self._ends[last] - stop
        begin = self._ends[first] - (self.sequence[first, 1] - self.sequence[first, 0])
        pieces[0, 0] += start - begin
        return pieces[np.argsort(pieces[:, 0], kind="stable")]


class GlobalBlockShard(BlockShard):
    """The shard of a rank in an epoch whose order is independent of the number of ranks.

    All ranks read all windows, in the same shuffled order, and rank r takes the rows at positions
    r, r + size, ...
    """

    @property
    def rounds(self) -> int:
        """Number of full windows."""
        return self.total // self.block

    def window_at(self, position: int) -> int:
        """Returns the last window in which any rank has this position of its shard."""
        return (min((position + 1) * self.plan.size, self.total) - 1) // self.block

    def pieces(self, window: int) -> Pieces:
        """Returns the pieces of a window, in the order of the file."""
        return self._cut(window * self.block, min((window + 1) * self.block, self.total))

    def positions(self, step: int) -> list[tuple[int, np.ndarray]]:
        """Returns the windows of a step, with the positions of the rows of this rank.

        The windows are the same on all ranks; a rank may have no rows in some of them.
        """
        start, stop = self.plan.bounds(step)
        mine = self.plan.rank + self.plan.size * np.arange(start, stop)
        # Rows that are repeated for equal batch sizes are the last row.
        positions = np.minimum(mine, self.total - 1)
        return [
            (window, positions[positions // self.block == window] - window * self.block)
            for window in range(start * self.plan.size // self.block, self.last_window(step) + 1)
        ]
