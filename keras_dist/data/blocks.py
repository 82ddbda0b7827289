"""Rows of a file in blocks: which contiguous pieces each rank reads, and when.

An epoch puts blocks of rows in an order. This line of blocks is cut into windows of one block
each, which go round the ranks; what is left at the end is shared out evenly. A rank reads one
window at a time and shuffles within it. Where the order of rows is to be one for any number of
ranks, all go through the same windows, and take turns. Pure arithmetic, as `partition`, whose plans
say how many rows a rank hands out and in what batches.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from keras_dist.data.partition import EvenPlan, Plan

__all__ = [
    "BlockShard",
    "GlobalBlockShard",
    "Pieces",
    "block_length",
    "left_over",
    "line_of_blocks",
    "rows_of",
    "share_of_rest",
]

Pieces = np.ndarray  # int64 of shape (count, 2): where each begins and ends

WINDOWS = 64  # that a small data set has at least, or its order would hardly be shuffled


def block_length(total: int, row_nbytes: int, batch_size: int, align: int, nbytes: int) -> int:
    """Returns how many rows a block has where the user does not say.

    Args:
        total: number of rows.
        row_nbytes: bytes of a row.
        batch_size: rows of a batch; a block is not smaller.
        align: of how many rows the length must be a multiple.
        nbytes: how many bytes a block may have, as far as the others allow it.
    """
    rows = max(batch_size, min(nbytes // max(1, row_nbytes), total // WINDOWS))
    return -(-rows // align) * align


def line_of_blocks(total: int, block: int, align: int, key: Sequence[int] | None) -> Pieces:
    """Returns the blocks of an epoch in its order, those that are shorter behind the others.

    Args:
        total: number of rows.
        block: rows of a block, a multiple of `align`.
        align: where blocks may begin: at its multiples.
        key: seed of the order; `None` for that of the file. With one, blocks begin elsewhere in
            every epoch, so that no two rows always come together.
    """
    random = np.random.default_rng(key) if key is not None else None
    shift = 0 if random is None else int(random.integers(block // align)) * align
    cuts = np.unique(np.concatenate([[0], np.arange(shift, total, block), [total]]))
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1).astype(np.int64)
    if random is None:
        return pieces
    pieces = random.permutation(pieces)
    is_whole = pieces[:, 1] - pieces[:, 0] == block
    return np.concatenate([pieces[is_whole], pieces[~is_whole]])


@dataclasses.dataclass(frozen=True)
class BlockShard:
    """One rank's part of an epoch, or of what is left of one.

    Args:
        line: pieces of rows, in order.
        block: rows of a window.
        plan: how many rows this rank hands out, in what batches; its `held` is the length of
            this part.
        key: seed of the order within windows; `None` for that of the file.
        first_step: the step at which it begins.
        earlier: the part that holds the steps before that: another rank had read further ahead
            when the rest was shared out.
    """

    line: Pieces
    block: int
    plan: Plan
    key: tuple[int, ...] | None
    first_step: int = 0
    earlier: "BlockShard | None" = None

    def at(self, step: int) -> "BlockShard":
        """Returns the part that holds a step: this one, or the one before it."""
        return self if self.earlier is None or step >= self.first_step else self.earlier.at(step)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.line[:, 1] - self.line[:, 0])

    @property
    def total(self) -> int:
        """Number of rows in the line."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def rounds(self) -> int:
        """Number of windows of a whole block that each rank has."""
        return self.total // (self.block * self.plan.size)

    def bounds(self, step: int) -> tuple[int, int]:
        """Returns where the batch of a step begins and ends among the places of this part."""
        return self.plan.bounds(step - self.first_step)

    def window_at(self, place: int) -> int:
        """Returns the number of the window in which a place lies."""
        return min(place // self.block, self.rounds)

    def pieces(self, window: int) -> Pieces:
        """Returns the rows of a window as pieces, in the order of the file."""
        rank, size = self.plan.rank, self.plan.size
        if window < self.rounds:
            start = (window * size + rank) * self.block
            return self._cut(start, start + self.block)
        begin = self.rounds * size * self.block
        fewest, more = divmod(self.total - begin, size)
        start = begin + rank * fewest + min(rank, more)
        return self._cut(start, start + fewest + (rank < more))

    def order(self, window: int) -> np.ndarray | None:
        """Returns the order in which a window's rows are handed out; `None` for as they are."""
        pieces = self.pieces(window)
        if self.key is None or not len(pieces):
            return None
        count = int((pieces[:, 1] - pieces[:, 0]).sum())
        return np.random.default_rng([*self.key, int(pieces[0, 0])]).permutation(count)

    def places(self, step: int) -> list[tuple[int, np.ndarray]]:
        """Returns the windows of a batch with the places, in each one's order, of its rows."""
        start, stop = self.bounds(step)
        # What is handed out a second time, so that batches are equal, is the last row.
        places = np.minimum(np.arange(start, stop), self.plan.held - 1)
        windows = np.minimum(places // self.block, self.rounds)
        return [
            (int(window), places[windows == window] - window * self.block)
            for window in np.unique(windows)
        ]

    def last_window(self, step: int) -> int:
        """Returns the last window of which any rank takes rows in a step."""
        if step - self.first_step < self.plan.steps - 1:
            return self.window_at(self.bounds(step)[1] - 1)
        # Rank 0 has as many rows as any.
        fewest, more = divmod(self.total, self.plan.size)
        most = self.plan.count if self.plan.count < fewest else fewest + (more > 0)
        return self.window_at(most - 1)

    def rows_left(self, window: int, step: int) -> Pieces:
        """Returns the rows of a window that are to be handed out from a step on."""
        pieces, order, begin = self.pieces(window), self.order(window), window * self.block
        rows = rows_of(pieces)
        low = max(self.bounds(step)[0] - begin, 0)
        high = min(self.plan.count, self.plan.held) - begin
        if low == 0 and high >= len(rows):
            return pieces
        return _as_pieces(np.sort((rows if order is None else rows[order])[low : max(low, high)]))

    def _cut(self, start: int, stop: int) -> Pieces:
        """Returns what of the line lies between two places, sorted."""
        if start >= stop:
            return np.empty((0, 2), np.int64)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        pieces = self.line[first : last + 1].copy()
        pieces[-1, 1] -= self._ends[last] - stop
        begin = self._ends[first] - (self.line[first, 1] - self.line[first, 0])
        pieces[0, 0] += start - begin
        return pieces[np.argsort(pieces[:, 0], kind="stable")]


class GlobalBlockShard(BlockShard):
    """One rank's part of an epoch whose order is the same for any number of ranks.

    The windows follow each other, each shuffled in itself; all ranks go through all of them, and
    rank r takes what comes at places r, r + size, ...
    """

    @property
    def rounds(self) -> int:
        """Number of windows of a whole block."""
        return self.total // self.block

    def window_at(self, place: int) -> int:
        """Returns the last window in which a place of this part lies for any rank."""
        return (min((place + 1) * self.plan.size, self.total) - 1) // self.block

    def pieces(self, window: int) -> Pieces:
        """Returns the rows of a window as pieces, in the order of the file."""
        return self._cut(window * self.block, min((window + 1) * self.block, self.total))

    def places(self, step: int) -> list[tuple[int, np.ndarray]]:
        """Returns the windows of a step with the places, in each one's order, of this rank's rows.

        They are the same windows for all ranks; of some a rank may take nothing.
        """
        start, stop = self.bounds(step)
        mine = self.plan.rank + self.plan.size * np.arange(start, stop)
        # What is handed out a second time, so that batches are equal, is the last row.
        places = np.minimum(mine, self.total - 1)
        return [
            (window, places[places // self.block == window] - window * self.block)
            for window in range(start * self.plan.size // self.block, self.last_window(step) + 1)
        ]

    def rows_left(self, window: int, step: int) -> Pieces:
        """Returns the rows of a window that this rank is to hand out from a step on."""
        rows, order = rows_of(self.pieces(window)), self.order(window)
        turns, ranks = divmod(window * self.block + np.arange(len(rows)), self.plan.size)
        mine = (ranks == self.plan.rank) & (turns >= self.bounds(step)[0])
        mine &= turns < min(self.plan.count, self.plan.held)
        return _as_pieces(np.sort((rows if order is None else rows[order])[mine]))


def rows_of(pieces: Pieces) -> np.ndarray:
    """Returns the numbers of the rows in pieces."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(*piece) for piece in pieces)])


def left_over(shares: Sequence[BlockShard], step: int) -> Pieces:
    """Returns the rows that nobody has handed out before a step, as a line of pieces.

    Args:
        shares: those of all ranks, the dead among them.
        step: the first step that nobody has taken.
    """
    windows = range(max(share.rounds for share in shares) + 1)
    return np.concatenate([piece for window in windows for piece in _left_of(window, shares, step)])


def _left_of(window: int, shares: Sequence[BlockShard], step: int) -> list[Pieces]:
    left = [share.rows_left(window, step) for share in shares]
    # What ranks took turns in lies side by side.
    together = isinstance(shares[0], GlobalBlockShard)
    return [_as_pieces(np.sort(rows_of(np.concatenate(left))))] if together else left


def share_of_rest(last: BlockShard, line: Pieces, rank: int, size: int, step: int) -> BlockShard:
    """Returns a rank's part of what is left of an epoch, in the steps that are left.

    Args:
        last: a part of the epoch so far.
        line: what is left.
        rank: whose part is wanted, by its number now.
        size: number of ranks now.
        step: the first step that nobody has taken.
    """
    fewest, more = divmod(len(rows_of(line)), size)
    count = fewest + (rank < more)
    steps = last.first_step + last.plan.steps - step
    plan = EvenPlan(rank, size, count, count, steps, last.plan.batch_size)
    return dataclasses.replace(last, line=line, plan=plan, first_step=step)


def _as_pieces(rows: np.ndarray) -> Pieces:
    """Returns ascending numbers of rows as pieces."""
    if not len(rows):
        return np.empty((0, 2), np.int64)
    cuts = np.flatnonzero(np.diff(rows) != 1)
    begins, ends = rows[np.r_[0, cuts + 1]], rows[np.r_[cuts, len(rows) - 1]] + 1
    return np.stack([begins, ends], axis=1)
