"""A `keras.utils.PyDataset` of the batches of a rank from a stream."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist.data.array_dataset import InOrder
from keras_dist.data.epochs import Epochs
from keras_dist.data.stream_batches import StreamBatches


class StreamDataset(InOrder):
    """The batches of a rank from a stream.

    Keras requests batches before an epoch begins, to infer their shapes. They are kept, and
    returned again within the epoch.
    """

    def __init__(
        self,
        batches: StreamBatches,
        iterate: Callable[[], Iterator[Any]],
        reads_once: bool,
        epochs: Epochs,
    ):
        super().__init__()
        self._batches, self._iterate, self._reads_once = batches, iterate, reads_once
        self._epochs = epochs
        self._epochs_read = 0  # of an iterator that is read once
        self._iterator: Iterator[Any] | None = None
        self._kept: dict[int, Any] = {}
        self._read = 0

    def __len__(self) -> int:
        return self._batches.steps

    def __getitem__(self, index: int) -> Any:
        in_epoch = self._positions is not None
        position = self.position(index)
        with self._lock:
            if self._iterator is None or (position < self._read and position not in self._kept):
                self._iterator = self._start()
            while self._read <= position:
                self._kept[self._read] = next(self._iterator)
                self._read += 1
            return self._kept.pop(position) if in_epoch else self._kept[position]

    def _end(self, advances: bool) -> None:
        super()._end(advances)
        with self._lock:
            if self._read > len(self._kept):  # the epoch has returned batches
                if self._reads_once:
                    # An epoch may end early; all ranks read the same number of elements.
                    collections.deque(self._iterator or (), maxlen=0)
                self._iterator = None
                self._read = 0
                self._epochs.advance()

    def _start(self) -> Iterator[Any]:
        self._kept, self._read = {}, 0
        elements = self._iterate()
        if self._reads_once:
            self._batches.skip(elements, self._epochs.number - self._epochs_read)
            self._epochs_read = self._epochs.number + 1
        return self._batches.of(elements)
