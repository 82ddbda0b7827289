"""The batches of a rank as a `keras.utils.PyDataset`, for every Keras backend."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.data import epochs


class Passes(keras.utils.PyDataset):
    """A data set that a script can loop over: each loop is the next epoch, as in `fit`.

    Subclasses define `_begin` and `_end`, which are called at the start and end of an epoch of the
    data: if `steps_per_epoch` of `fit` is below the number of batches, it spans several of Keras.
    """

    _loop: str | None = None  # "begun" or "ended"; none in an epoch of Keras
    # The fit that reads on, by a weak reference, and the steps it has read.
    _part: tuple[weakref.ReferenceType[Any], int] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._restart()
        self._loop = "begun"
        for index in range(len(self)):
            yield self[index]
        self._loop = "ended"
        self._end(True)

    def on_epoch_begin(self) -> None:
        """Starts an epoch, unless Keras reads on."""
        fit, steps = epochs.steps_of(self)
        if self._part is None or steps is None or self._part[0]() is not fit:
            self._restart()

    def on_epoch_end(self) -> None:
        """Advances to the next epoch, unless the end of a loop has done so."""
        loop, self._loop = self._loop, None
        if loop is None and self._is_part():
            return
        # Keras reads a batch for its shapes, and ends this "epoch" before the first one of `fit`.
        self._end(loop == "begun" or (loop is None and not epochs.awaits_steps(self)))

    def _restart(self) -> None:
        """Starts an epoch; ends that of a loop or a fit which was left early."""
        if self._loop == "begun" or self._part is not None:
            self._end(True)
        self._loop = self._part = None
        self._begin()

    def _is_part(self) -> bool:
        """Returns whether the next epoch of Keras reads on."""
        fit, steps = epochs.steps_of(self)
        if steps is None or epochs.awaits_steps(self):
            return False
        read = steps + (self._part[1] if self._part is not None else 0)
        self._part = (weakref.ref(fit), read) if read < len(self) else None
        return self._part is not None

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self, advances: bool) -> None:
        raise NotImplementedError


class InOrder(Passes):
    """A data set whose batches keep their order within `fit`.

    `dataset[i]` is batch i. `fit` requests the indices in a random order, a different one on
    each rank. Within an epoch, the k-th index that Keras requests therefore maps to batch k: the
    batches of a step have the same size on every rank, and runs are repeatable. With workers,
    batches are requested in advance, and index i is batch i.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._lock = threading.Lock()
        self._positions: dict[int, int] | None = None  # by requested index

    def _begin(self) -> None:
        self._positions = {}

    def _end(self, advances: bool) -> None:
        self._positions = None

    def position(self, index: int) -> int:
        """Returns the number of the batch to return for a requested index."""
        index = range(len(self))[index]
        # Requests of workers come in any order; `fit` lets Keras keep that of the indices.
        if self._positions is None or epochs.has_workers(self):
            return index
        with self._lock:
            return self._positions.setdefault(index, len(self._positions))


class ArrayDataset(InOrder):
    """One rank's batches, as `indexed.Batches`, in a new order each epoch."""

    def __init__(self, batches: Any, source: keras.utils.PyDataset | None = None):
        names = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(source, name) for name in names if source is not None})
        self._batches = batches
        self._source = source

    def __len__(self) -> int:
        return self._batches.plan.steps

    def __getitem__(self, index: int) -> Any:
        return self._batches.batch(self._batches.epochs.number, self.position(index))

    def _begin(self) -> None:
        super()._begin()
        if self._source is not None:
            self._source.on_epoch_begin()

    def _end(self, advances: bool) -> None:
        super()._end(advances)
        if advances:
            self._batches.epochs.advance()
        if self._source is not None:
            self._source.on_epoch_end()
