"""Batches of rows that lie in files: windows are read whole, the next one ahead of its use."""

import concurrent.futures
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist.data.blocks import (
    BlockShard,
    GlobalBlockShard,
    left_over,
    line_of_blocks,
    share_of_rest,
)
from keras_dist.data.epochs import Epochs
from keras_dist.data.mpi_readers import CollectiveReader
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.partition import Plan
from keras_dist.data.readers import Reader
from keras_dist.data.segments import Column

__all__ = ["BlockBatches", "Cut"]

PlanAmong = Callable[[int, int], Plan]  # of a rank and the number of ranks


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an epoch is cut into blocks.

    Args:
        total: number of rows.
        block: rows of a block.
        align: where blocks may begin: at its multiples.
        seed: for the order of every epoch; `None` keeps that of the files.
        is_global: whether the order is one for any number of ranks.
    """

    total: int
    block: int
    align: int
    seed: int | None
    is_global: bool = False

    def share(self, plan: Plan, epoch: int) -> BlockShard:
        """Returns the part of a rank in an epoch."""
        key = None if self.seed is None else (self.seed, epoch)
        line = line_of_blocks(self.total, self.block, self.align, key)
        return (GlobalBlockShard if self.is_global else BlockShard)(line, self.block, plan, key)


class BlockBatches:
    """One rank's batches of rows, for any epoch.

    It holds the window that is handed out and the one that comes next.

    Args:
        data: the columns in the structure of a batch.
        reader: reads the columns, in the order in which they stand there.
        cut: how an epoch is cut.
        plan: this rank's part of it.
        kind: what the whole data set is, see `Epochs`.
        plan_among: makes the plan of a rank among fewer, of its number and theirs. Defaults to
            none: batches keep their sizes.
    """

    def __init__(
        self,
        data: Any,
        reader: Reader,
        cut: Cut,
        plan: Plan,
        kind: str,
        plan_among: PlanAmong | None = None,
    ):
        self.example, self.plan, self.position = data, plan, (0, 0)
        self.lock = threading.RLock()
        self.epochs = Epochs(kind, self if plan_among is not None else None)
        if cut.is_global:
            self.epochs.global_batch = plan.batch_size * plan.size
        self._plan_among, self._cut, self._reader = plan_among, cut, reader
        # All ranks read when they come to a window, and no thread reads ahead.
        self._together = reader if isinstance(reader, CollectiveReader) else None
        self._columns: list[Column] = [column for _, column in leaves(data, "")]
        self._pid = os.getpid()
        self._shares: dict[int, BlockShard] = {}  # by epoch: the last one, or what was left of one
        # By epoch, the step at which the part begins, and number.
        self._windows: dict[tuple[int, int, int], concurrent.futures.Future] = {}
        if hasattr(reader, "close"):
            weakref.finalize(self, reader.close)

    @property
    def sizes(self) -> set[int]:
        """The numbers of samples that batches may have; none where they may change."""
        return set(self.plan.sizes()) if self._plan_among is None else set()

    def batch(self, epoch: int, step: int) -> Any:
        """Returns arrays with the rows of a step, nested like the data."""
        with self.lock:
            self.position = max(self.position, (epoch, step + 1))
            share = self._share(epoch).at(step)
            parts = [
                self._taken(epoch, share, window, places) for window, places in share.places(step)
            ]
            if self._together is not None:
                self._window(epoch, share, share.last_window(step))
                if step == self.plan.steps - 1:
                    self._together.release()
        rows = [_joined(arrays) for arrays in zip(*parts, strict=True)]
        return mapped(lambda _: rows.pop(0), self.example)

    def share_out(self, rank: int, size: int, position: tuple[int, int] | None) -> None:
        """Shares the data out among fewer ranks, from a batch on, or else from the next epoch."""
        if self._plan_among is None or size == self.plan.size:
            return
        with self.lock:
            shares = {}
            if position is not None and position[1] < self.plan.steps:
                epoch, step = position
                everyone = [self._share_of(place, epoch) for place in range(self.plan.size)]
                line = left_over(everyone, step)
                rest = share_of_rest(everyone[0], line, rank, size, step)
                shares[epoch] = dataclasses.replace(rest, earlier=self._share(epoch))
            self.plan = self._plan_among(rank, size)
            self._shares = shares
            self._windows.clear()

    def _share_of(self, rank: int, epoch: int) -> BlockShard:
        """Returns the part of one of the ranks that there were, perhaps dead now."""
        share = self._share(epoch)
        if not share.first_step:
            plan = self._plan_among(rank, self.plan.size) if self._plan_among else self.plan
            return dataclasses.replace(share, plan=plan)
        return share_of_rest(share, share.line, rank, self.plan.size, share.first_step)

    def _share(self, epoch: int) -> BlockShard:
        if epoch not in self._shares:
            self._shares = {epoch: self._cut.share(self.plan, epoch)}
        return self._shares[epoch]

    def _taken(
        self, epoch: int, share: BlockShard, window: int, places: np.ndarray
    ) -> list[np.ndarray]:
        """Returns rows of a window, by their places in its order."""
        arrays, order = self._window(epoch, share, window)
        if order is None and len(places) == places[-1] - places[0] + 1:
            return [array[places[0] : places[-1] + 1] for array in arrays]
        rows = places if order is None else order[places]
        return [array.take(rows, axis=0) for array in arrays]

    def _window(
        self, epoch: int, share: BlockShard, window: int
    ) -> tuple[Sequence[np.ndarray], np.ndarray | None]:
        if os.getpid() != self._pid:  # a fork has none of the threads that were reading
            self._pid, self._windows = os.getpid(), {}
        place = epoch, share.first_step
        wanted = [(*place, window)]
        if self._together is None and window < share.window_at(
            min(share.plan.count, share.plan.held) - 1
        ):
            wanted.append((*place, window + 1))
        known = self._windows
        self._windows = {
            key: known[key] if key in known else self._begin(share, key[2]) for key in wanted
        }
        return self._windows[*place, window].result()

    def _begin(self, share: BlockShard, window: int) -> concurrent.futures.Future:
        """Begins to read a window."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        read = self._reader.read

        def run() -> None:
            try:
                future.set_result((read(share.pieces(window)), share.order(window)))
            except BaseException as failure:  # it belongs to who waits for the window
                future.set_exception(failure)

        if self._together is None:
            # Not of a pool, for which the interpreter would wait at its end.
            threading.Thread(target=run, name="keras_dist reader", daemon=True).start()
        else:
            run()
        return future


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
