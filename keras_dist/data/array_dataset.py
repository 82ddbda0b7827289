"""A `keras.utils.PyDataset` of one rank's batches, for every Keras backend."""

import threading
from typing import Any

import keras

from keras_dist.data.rank_batches import RankBatches

__all__ = ["ArrayDataset", "InOrder"]


class InOrder(keras.utils.PyDataset):
    """A data set whose batches keep their order within `fit`.

    `dataset[i]` is batch i. `fit` requests the indices in a random order, a different one on
    each rank. Within an epoch, the k-th index that Keras requests therefore maps to batch k: the
    batches of a step have the same size on every rank, and runs are repeatable.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._lock = threading.Lock()
        self._positions: dict[int, int] | None = None  # by requested index

    def on_epoch_begin(self) -> None:
        """Starts to map requested indices to consecutive batches."""
        self._positions = {}

    def on_epoch_end(self) -> None:
        """Ends the mapping of this epoch."""
        self._positions = None

    def position(self, index: int) -> int:
        """Returns the number of the batch to return for a requested index."""
        index = range(len(self))[index]
        # Worker processes cannot see the requests of the others.
        if self._positions is None or self.use_multiprocessing:
            return index
        with self._lock:
            return self._positions.setdefault(index, len(self._positions))


class ArrayDataset(InOrder):
    """One rank's batches of data with random access, in a new order each epoch.

    Args:
        batches: the batches of this rank.
        source: the user's data set, whose worker settings apply and whose epoch hooks are called.
            Defaults to none.
    """

    def __init__(self, batches: RankBatches, source: keras.utils.PyDataset | None = None):
        names = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(source, name) for name in names if source is not None})
        self._batches = batches
        self._source = source

    def __len__(self) -> int:
        return self._batches.plan.steps

    def __getitem__(self, index: int) -> Any:
        return self._batches.batch(self._batches.epochs.number, self.position(index))

    def on_epoch_begin(self) -> None:
        """Starts to map requested indices to consecutive batches."""
        super().on_epoch_begin()
        if self._source is not None:
            self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Advances to the order of the next epoch."""
        super().on_epoch_end()
        self._batches.epochs.advance()
        if self._source is not None:
            self._source.on_epoch_end()
