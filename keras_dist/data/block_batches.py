"""The batches of a rank from rows of files, read in windows; the next window is prefetched."""

import concurrent.futures
import dataclasses
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist.data.blocks import (
    BlockShard,
    GlobalBlockShard,
    ordered_blocks,
)
from keras_dist.data.epochs import Epochs
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.partition import Plan, PlanFor
from keras_dist.data.readers import Reader
from keras_dist.data.scattering import ScatteringReader
from keras_dist.data.segments import Column


@dataclasses.dataclass(frozen=True)
class Cut:
    """The division of an epoch into blocks."""

    total: int
    block: int
    align: int
    seed: int | None
    is_global: bool = False

    def portion(self, plan: Plan, epoch: int) -> BlockShard:
        """Returns the shard of a rank in an epoch."""
        key = None if self.seed is None else (self.seed, epoch)
        blocks = ordered_blocks(self.total, self.block, self.align, key)
        return (GlobalBlockShard if self.is_global else BlockShard)(blocks, self.block, plan, key)


class BlockBatches:
    """The batches of a rank in any epoch.

    Keeps the current window and the next one in memory.
    """

    def __init__(
        self,
        data: Any,
        reader: Reader,
        cut: Cut,
        plan: Plan,
        kind: str,
        plan_for: PlanFor | None = None,
    ):
        self.example, self.plan = data, plan
        self._lock = threading.RLock()
        self.epochs = Epochs(kind, self if plan_for is not None else None)
        if cut.is_global:
            self.epochs.global_batch = plan.batch_size * plan.size
        self._plan_among, self._cut, self._reader = plan_for, cut, reader
        # Collective reads happen on all ranks at the same step, and nothing is prefetched.
        self._is_collective = isinstance(reader, ScatteringReader)
        self._columns: list[Column] = [column for _, column in leaves(data, "")]
        self._pid = os.getpid()
        self._portions: dict[int, BlockShard] = {}  # by epoch; the latest
        # By epoch and number of the window.
        self._windows: dict[tuple[int, int], concurrent.futures.Future] = {}
        if hasattr(reader, "close"):
            weakref.finalize(self, reader.close)

    @property
    def sizes(self) -> set[int]:
        """The possible numbers of samples of a batch; empty if they may change."""
        return set(self.plan.sizes()) if self._plan_among is None else set()

    def batch(self, epoch: int, step: int) -> Any:
        """Returns arrays with the rows of a step, in the structure of the data."""
        with self._lock:
            share = self._portion(epoch)
            parts = [
                self._rows(epoch, share, window, rows) for window, rows in share.positions(step)
            ]
            if self._is_collective:
                self._window(epoch, share, share.last_window(step))
        rows = [_concatenated(arrays) for arrays in zip(*parts, strict=True)]
        return mapped(lambda _: rows.pop(0), self.example)

    def reshard(self, rank: int, size: int) -> None:
        """Distributes the data over other ranks, from the next epoch on."""
        if self._plan_among is None or (rank, size) == (self.plan.rank, self.plan.size):
            return
        with self._lock:
            self.plan = self._plan_among(rank, size)
            self._portions.clear()
            self._windows.clear()

    def _portion(self, epoch: int) -> BlockShard:
        if epoch not in self._portions:
            self._portions = {epoch: self._cut.portion(self.plan, epoch)}
        return self._portions[epoch]

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
        """Starts to read a window."""
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


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
