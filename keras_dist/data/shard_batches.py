"""One rank's batches of rows that lie in pieces of files."""

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist.data.epochs import Epochs
from keras_dist.data.file_shards import GlobalShard, RankShard
from keras_dist.data.partition import Spread

__all__ = ["ShardBatches", "ShardReader"]


class ShardReader(Protocol):
    """Reads rows of pieces."""

    @property
    def example(self) -> Any:
        """What has the dtypes of a batch and its shapes but for the first axis, nested like it."""

    def read(self, pieces: np.ndarray, rows: np.ndarray) -> Any:
        """Returns new arrays with a row of a piece for each, nested like the data."""


class ShardBatches:
    """One rank's batches, for any epoch.

    Args:
        reader: reads the rows.
        share: the rows of this rank.
        plan: the sizes of its batches.
        key: whole numbers from which, with the epoch, the orders follow; `None` keeps that of the
            files.
        mixed: how many pieces are shuffled together.
        epochs: the epochs of the data.
    """

    def __init__(
        self,
        reader: ShardReader,
        share: RankShard | GlobalShard,
        plan: Spread,
        key: Sequence[int] | None,
        mixed: int,
        epochs: Epochs,
    ):
        self.example, self.plan, self.epochs = reader.example, plan, epochs
        self.lock = threading.RLock()
        self._reader, self._share, self._key, self._mixed = reader, share, key, mixed
        self._begins = [0, *itertools.accumulate(plan.sizes)]
        self._latest = (0, self._order_of(0))

    @property
    def sizes(self) -> set[int]:
        """The numbers of samples that batches may have."""
        return set(self.plan.sizes)

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the rows of a step, in the structure of the data."""
        with self.lock:
            pieces, rows = self._order(epoch)
        mine = slice(self._begins[step], self._begins[step + 1])
        return self._reader.read(pieces[mine], rows[mine])

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self._latest[0] != epoch and self._key is not None:
            self._latest = (epoch, self._order_of(epoch))
        return self._latest[1]

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        key = None if self._key is None else [*self._key, epoch]
        pieces, rows = self._share.order(key, self._mixed)
        # Under "pad" a rank begins anew with what it has.
        return np.resize(pieces, self.plan.count), np.resize(rows, self.plan.count)
