"""Partition of the rows of files into contiguous blocks, see decision 36. Pure index arithmetic."""

import concurrent.futures
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist.data.indexed import Batches
from keras_dist.data.nested import mapped
from keras_dist.data.partition import Plan, PlanFor
from keras_dist.data.readers import FileReader, Pieces, ScatteringReader

WINDOWS = 64  # smallest number of windows of a data set, for a sufficient shuffle


def block_length(total: int, row_nbytes: int, batch_size: int, align: int, nbytes: int) -> int:
    """Returns the default rows of a block: `nbytes` or less, unless a batch or `align` is more."""
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
    def turn(self) -> tuple[int, int]:
        """The place of this rank among those that take turns with windows, and their number."""
        return self.plan.rank, self.plan.size

    @property
    def rounds(self) -> int:
        """Number of full windows of each rank."""
        return self.total // (self.block * self.turn[1])

    def window_at(self, position: int) -> int:
        return min(position // self.block, self.rounds)

    def pieces(self, window: int) -> Pieces:
        """Returns the pieces of a window, in the order of the file."""
        rank, size = self.turn
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
    def turn(self) -> tuple[int, int]:
        """One place, as all ranks read all windows."""
        return 0, 1

    def window_at(self, position: int) -> int:
        """Returns the last window in which any rank has this position of its shard."""
        return (min((position + 1) * self.plan.size, self.total) - 1) // self.block

    def positions(self, step: int) -> list[tuple[int, np.ndarray]]:
        """Returns a step's windows, the same on all ranks, with positions of rows of this rank."""
        start, stop = self.plan.bounds(step)
        mine = self.plan.rank + self.plan.size * np.arange(start, stop)
        # Rows that are repeated for equal batch sizes are the last row.
        positions = np.minimum(mine, self.total - 1)
        return [
            (window, positions[positions // self.block == window] - window * self.block)
            for window in range(start * self.plan.size // self.block, self.last_window(step) + 1)
        ]


class BlockBatches(Batches):
    """The batches of a rank of rows of files, with this window and the next one in memory."""

    def __init__(
        self,
        example: Any,
        reader: FileReader | ScatteringReader,
        share_of: Callable[[Any, int], BlockShard],
        plan: Plan,
        kind: str,
        global_batch: int | None,
        plan_for: PlanFor | None,
    ):
        super().__init__(example, plan, kind, global_batch, plan_for)
        self._share_of, self._reader = share_of, reader
        # Collective reads happen on all ranks at the same step, and nothing is prefetched.
        self._is_collective = isinstance(reader, ScatteringReader)
        self._pid = os.getpid()
        self._shares: dict[int, BlockShard] = {}  # by epoch; the latest
        # By epoch and number of the window.
        self._windows: dict[tuple[int, int], concurrent.futures.Future] = {}
        weakref.finalize(self, reader.close)

    def batch(self, epoch: int, step: int) -> Any:
        with self._lock:
            if epoch not in self._shares:
                self._shares = {epoch: self._share_of(self.plan, epoch)}
            share = self._shares[epoch]
            parts = [
                self._rows(epoch, share, window, rows) for window, rows in share.positions(step)
            ]
            if self._is_collective:
                self._window(epoch, share, share.last_window(step))
        rows = [
            arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for arrays in zip(*parts, strict=True)
        ]
        return mapped(lambda _: rows.pop(0), self.example)

    def _forget(self) -> None:
        self._shares.clear()
        self._windows.clear()

    def _rows(
        self, epoch: int, share: BlockShard, window: int, positions: np.ndarray
    ) -> list[np.ndarray]:
        """Returns rows of a window, by their positions in its order."""
        arrays, order = self._window(epoch, share, window)
        if order is None and len(positions) == positions[-1] - positions[0] + 1:
            return [array[positions[0] : positions[-1] + 1] for array in arrays]
        rows = positions if order is None else order[positions]
        return [array.take(rows, axis=0) for array in arrays]

    def _window(
        self, epoch: int, share: BlockShard, window: int
    ) -> tuple[Sequence[np.ndarray], np.ndarray | None]:
        if os.getpid() != self._pid:  # a fork has no reader threads
            self._pid, self._windows = os.getpid(), {}
        wanted = [(epoch, window)]
        if not self._is_collective and window < share.window_at(
            min(share.plan.count, share.plan.held) - 1
        ):
            wanted.append((epoch, window + 1))
        known = self._windows
        self._windows = {
            key: known[key] if key in known else self._start(share, key[1]) for key in wanted
        }
        return self._windows[epoch, window].result()

    def _start(self, share: BlockShard, window: int) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        read = self._reader.read

        def run() -> None:
            try:
                future.set_result((read(share.pieces(window)), share.order(window)))
            except BaseException as failure:  # raised where the window is used
                future.set_exception(failure)

        if self._is_collective:
            run()
        else:
            # Not a pool: the interpreter would join its threads at exit.
            threading.Thread(target=run, name="keras_dist reader", daemon=True).start()
        return future
