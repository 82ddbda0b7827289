"""The batches of this rank as a `keras.utils.PyDataset`, for every backend."""

import threading
from typing import Any

import keras

from keras_dist.data.rank_batches import RankBatches

__all__ = ["ArrayDataset", "InOrder"]


class InOrder(keras.utils.PyDataset):
    """A data set that returns batches in order, whatever the order of the requests.

    `dataset[i]` is batch i. `fit` requests batches in a random order, another one on every rank.
    Within an epoch the k-th request returns batch k, so the batches of a step have the same size
    on every rank, and runs are reproducible.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._lock = threading.Lock()
        self._requests: dict[int, int] | None = None  # number of the request by its index

    def on_epoch_begin(self) -> None:
        """Starts to return batches in the order of the requests."""
        self._requests = {}

    def on_epoch_end(self) -> None:
        """Ends the order of this epoch."""
        self._requests = None

    def in_order(self, index: int) -> int:
        """Returns the index of the batch to return for a request."""
        index = range(len(self))[index]
        # Worker processes do not know the requests of the others.
        if self._requests is None or self.use_multiprocessing:
            return index
        with self._lock:
            return self._requests.setdefault(index, len(self._requests))


class ArrayDataset(InOrder):
    """The batches of one rank, in a new order after every epoch.

    Args:
        batches: the batches of this rank.
        source: the user's data set, whose workers are used and whose epoch hooks are called.
            Defaults to `None`.
    """

    def __init__(self, batches: RankBatches, source: keras.utils.PyDataset | None = None):
        names = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(source, name) for name in names if source is not None})
        self._batches = batches
        self._source = source

    def __len__(self) -> int:
        return self._batches.plan.steps

    def __getitem__(self, index: int) -> Any:
        return self._batches.batch(self._batches.epochs.number, self.in_order(index))

    def on_epoch_begin(self) -> None:
        """Starts to return batches in the order of the requests."""
        super().on_epoch_begin()
        if self._source is not None:
            self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Continues with the order of the next epoch."""
        super().on_epoch_end()
        self._batches.epochs.advance()
        if self._source is not None:
            self._source.on_epoch_end()
