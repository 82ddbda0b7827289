"""This rank's batches as a data set that Keras takes on every backend."""

import threading
from typing import Any

import keras

from keras_dist.data.rank_batches import RankBatches

__all__ = ["ArrayDataset", "InOrder"]


class InOrder(keras.utils.PyDataset):
    """Batches that come in one order, whatever the order in which they are asked for.

    `dataset[i]` is batch i. Within `fit` the batches keep their order too, though `fit`
    asks for them in an order that it draws for itself, another on every rank: the k-th
    batch that Keras asks for in an epoch is batch k, so the batches of a step have the same
    size on every rank and a run can be repeated.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._lock = threading.Lock()
        self._asked: dict[int, int] | None = None  # by index that Keras asked for, its place

    def on_epoch_begin(self) -> None:
        """Begins to hand out batches in order, whatever the order they are asked for."""
        self._asked = {}

    def on_epoch_end(self) -> None:
        """Ends the order of this epoch."""
        self._asked = None

    def place(self, index: int) -> int:
        """Returns which batch of the epoch is to be handed out."""
        index = range(len(self))[index]
        # Worker processes cannot see what the others were asked for.
        if self._asked is None or self.use_multiprocessing:
            return index
        with self._lock:
            return self._asked.setdefault(index, len(self._asked))


class ArrayDataset(InOrder):
    """One rank's part of data whose samples are known by number; a new order after every epoch.

    Args:
        batches: the batches of this rank.
        source: a data set whose workers these are, and that is told of epochs. Defaults to none.
    """

    def __init__(self, batches: RankBatches, source: keras.utils.PyDataset | None = None):
        names = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(source, name) for name in names if source is not None})
        self._batches = batches
        self._source = source

    def __len__(self) -> int:
        return self._batches.plan.steps

    def __getitem__(self, index: int) -> Any:
        return self._batches.batch(self._batches.epochs.number, self.place(index))

    def on_epoch_begin(self) -> None:
        """Begins to hand out batches in order, whatever the order they are asked for."""
        super().on_epoch_begin()
        if self._source is not None:
            self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Goes on to the order of the next epoch."""
        super().on_epoch_end()
        self._batches.epochs.advance()
        if self._source is not None:
            self._source.on_epoch_end()
