"""This rank's batches of a stream as a data set that Keras takes on every backend."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist.data.array_dataset import InOrder
from keras_dist.data.epochs import Epochs
from keras_dist.data.stream_batches import StreamBatches

__all__ = ["StreamDataset"]


class StreamDataset(InOrder):
    """One rank's part of what is read one element after another.

    Keras looks at batches before an epoch begins, to learn their shapes: those that have been read
    and not been handed out within the epoch are kept until then.

    Args:
        batches: which elements make up the batches of this rank.
        opened: makes the stream anew for each epoch, or returns the one that there is.
        is_one: whether there is but one.
        epochs: the epochs of this data.
    """

    def __init__(
        self,
        batches: StreamBatches,
        opened: Callable[[], Iterator[Any]],
        is_one: bool,
        epochs: Epochs,
    ):
        super().__init__()
        self._batches, self._opened, self._is_one = batches, opened, is_one
        self._epochs = epochs
        self._passed = 0  # epochs that have been read of the one stream
        self._running: Iterator[Any] | None = None
        self._kept: dict[int, Any] = {}
        self._read = 0

    def __len__(self) -> int:
        return self._batches.steps

    def __getitem__(self, index: int) -> Any:
        within = self._positions is not None
        place = self.position(index)
        with self._lock:
            if self._running is None or (place < self._read and place not in self._kept):
                self._running = self._begun()
            while self._read <= place:
                self._kept[self._read] = next(self._running)
                self._read += 1
            return self._kept.pop(place) if within else self._kept[place]

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch."""
        super().on_epoch_end()
        with self._lock:
            if self._read > len(self._kept):  # what has only been looked at is not over
                if self._is_one:  # of which all ranks read as much, also of an epoch
                    collections.deque(self._running or (), maxlen=0)  # that was left early
                self._running = None
                self._read = 0
                self._epochs.advance()

    def _begun(self) -> Iterator[Any]:
        self._kept, self._read = {}, 0
        elements = self._opened()
        if self._is_one:
            self._batches.skip(elements, self._epochs.number - self._passed)
            self._passed = self._epochs.number + 1
        return self._batches.of(elements)
