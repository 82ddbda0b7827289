"""The batches of a rank from rows of file pieces."""

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist.data.epochs import Epochs
from keras_dist.data.file_shards import GlobalShard, RankShard
from keras_dist.data.spread import Spread


class ShardReader(Protocol):
    """Reads rows of file pieces."""

    @property
    def example(self) -> Any:
        """Arrays in the structure of a batch, with its dtypes and shapes except the first axis."""

    def read(self, pieces: np.ndarray, rows: np.ndarray) -> Any:
        """Returns new arrays with the given rows, in the structure of the data.

        Args:
            pieces: int64 array of shape `(count,)`, the piece of each row.
            rows: int64 array of shape `(count,)`, the number of each row in its piece.
        """


class ShardBatches:
    """The batches of a rank in any epoch."""

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
        self._reader, self._portion, self._key, self._mixed = reader, share, key, mixed
        self._begins = [0, *itertools.accumulate(plan.sizes)]
        self._cached = (0, self._order_of(0))

    @property
    def sizes(self) -> set[int]:
        """The possible numbers of samples of a batch."""
        return set(self.plan.sizes)

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the rows of a step, in the structure of the data."""
        with self.lock:
            pieces, rows = self._order(epoch)
        mine = slice(self._begins[step], self._begins[step + 1])
        return self._reader.read(pieces[mine], rows[mine])

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self._cached[0] != epoch and self._key is not None:
            self._cached = (epoch, self._order_of(epoch))
        return self._cached[1]

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        key = None if self._key is None else [*self._key, epoch]
        pieces, rows = self._portion.order(key, self._mixed)
        # With "pad" a rank repeats its first rows.
        return np.resize(pieces, self.plan.count), np.resize(rows, self.plan.count)
