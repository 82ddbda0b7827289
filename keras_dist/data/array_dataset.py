"""This rank's batches of arrays as a data set that Keras takes on every backend."""

import threading
from typing import Any

import keras

from keras_dist.data.arrays import ArrayBatches

__all__ = ["ArrayDataset"]


class ArrayDataset(keras.utils.PyDataset):
    """One rank's part of arrays, in batches; a new order after every epoch.

    `dataset[i]` is batch i. Within `fit` the batches keep their order too, though `fit`
    asks for them in an order that it draws for itself, another on every rank: the k-th
    batch that Keras asks for in an epoch is batch k, so the batches of a step have the same
    size on every rank and a run can be repeated.

    Args:
        batches: the batches of this rank.
    """

    def __init__(self, batches: ArrayBatches):
        super().__init__()
        self._batches = batches
        self._lock = threading.Lock()
        self._asked: dict[int, int] | None = None  # by index that Keras asked for, its place

    def __len__(self) -> int:
        return self._batches.plan.steps

    def __getitem__(self, index: int) -> Any:
        return self._batches.batch(
            self._batches.epochs.number, self._place(range(len(self))[index])
        )

    def on_epoch_begin(self) -> None:
        """Begins to hand out batches in order, whatever the order they are asked for."""
        self._asked = {}

    def on_epoch_end(self) -> None:
        """Goes on to the order of the next epoch."""
        self._asked = None
        self._batches.epochs.advance()

    def _place(self, index: int) -> int:
        # Worker processes cannot see what the others were asked for.
        if self._asked is None or self.use_multiprocessing:
            return index
        with self._lock:
            return self._asked.setdefault(index, len(self._asked))
