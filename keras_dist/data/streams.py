"""Sharding of iterables such as generators: every rank reads all, and keeps every n-th element."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.array_dataset import InOrder
from keras_dist.data.consistency import Compared
from keras_dist.data.epochs import Epochs, is_awaited, kind_of
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.nested import as_array, concatenated, leaves, mapped, stacked
from keras_dist.data.partition import plan_round_robin
from keras_dist.data.shard_options import Fact, ShardOptions, wrong_kind

SAME = "Pass shard() a function that makes the same generator on every rank."

Round = list[Any]  # consecutive elements for one step of all ranks


def source_of_stream(data: Any, options: ShardOptions) -> Compared:
    """Returns the source of an iterator, or of a function that makes one for each epoch."""
    remedy = "A generator keeps its order; shuffle in the generator."
    own = {"shuffle": remedy, "shuffle_buffer": remedy, "reader": "Only files have a reader."}
    own["draws"] = "Draws need random access to samples; draw in the generator."
    options.refuse("a generator", own)
    batch_size, reads_once = _batch_size(options), isinstance(data, Iterator)

    def iterate() -> Iterator[Any]:
        iterable = data() if callable(data) else data
        if not hasattr(iterable, "__iter__"):
            raise wrong_kind("the function to return a generator", iterable)
        return iter(iterable)

    total, steps = None, options.steps
    if steps is None:
        if reads_once:
            raise errors.DataError(
                "steps, or a function that makes a generator for each epoch",
                "an iterator, which can be read only once",
                "Pass steps, the number of batches in an epoch on each rank, or the function "
                "itself, without calling it.",
            )
        total = sum(1 for _ in iterate())
        options.need_samples(total, "samples" if batch_size else "batches")
        if batch_size is None:
            steps = plan_round_robin(total, options.size, options.remainder).steps
        else:
            steps = options.plan(total, batch_size).steps
    facts = [
        Fact("the kind of data", "a generator", SAME),
        Fact("the number of its elements", total, SAME),
        *options.facts(),
    ]
    kind = kind_of(dataclasses.replace(options, shuffle=False).lasting(facts))
    epochs = Epochs(kind, options.size * (batch_size or 1))
    dataset = StreamDataset(options, batch_size, steps, iterate, reads_once, epochs)
    return Compared(facts, dataset, epochs=epochs)


def _batch_size(options: ShardOptions) -> int | None:
    if options.batched:
        remedy = "Batches of a generator are not split; leave out one of the two arguments."
        options.refuse(
            "batches of a generator", {"batch_size": remedy, "global_batch_size": remedy}
        )
        return None
    if options.batched is False:
        return options.batch_size or DEFAULT_BATCH_SIZE
    return options.batch_size


class StreamDataset(InOrder):
    """The batches of a rank from a stream.

    Keras requests batches before the first epoch, to infer their shapes. They are kept, and
    returned again within the epoch.
    """

    def __init__(
        self,
        options: ShardOptions,
        batch_size: int | None,
        steps: int,
        iterate: Callable[[], Iterator[Any]],
        reads_once: bool,
        epochs: Epochs,
    ):
        super().__init__()
        self._options, self._per_batch, self._steps = options, batch_size, steps
        self._iterate, self._reads_once, self._epochs = iterate, reads_once, epochs
        self._width = options.size * (batch_size or 1)  # elements of a step of all ranks
        self._epochs_read = 0  # of an iterator that is read once
        self._iterator: Iterator[Any] | None = None
        self._kept: dict[int, Any] = {}
        self._read = 0

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        # Before its steps, a fit reads a batch for its shapes, even after a loop left early.
        in_epoch = self._positions is not None and not is_awaited(self._epochs)
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
                self._read_rest()
                self._iterator = None
                self._read = 0
                self._epochs.advance()

    def _read_rest(self) -> None:
        """Reads what an epoch that ended early has left: all ranks read as many elements."""
        if self._reads_once:
            collections.deque(self._iterator or (), maxlen=0)

    def _start(self) -> Iterator[Any]:
        self._kept, self._read = {}, 0
        if self._epochs_read > self._epochs.number:  # of a loop that was left early
            self._read_rest()
            self._epochs.advance()
        elements = self._iterate()
        if self._reads_once:
            skipped = (self._epochs.number - self._epochs_read) * self._steps * self._width
            next(itertools.islice(elements, skipped, skipped), None)
            self._epochs_read = self._epochs.number + 1
        return self._batches_of(elements)

    def _batches_of(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an epoch."""
        made = 0
        for elements_of_step in itertools.islice(self._rounds(elements), self._steps):
            yield self._portion(elements_of_step)
            made += 1
        if made < self._steps:
            raise errors.DataError(
                f"data for {self._steps} steps on each of {self._options.size} ranks",
                f"data that ended after {made}",
                "Lower steps, or make the generator yield as many elements each time.",
            )

    def _rounds(self, elements: Iterator[Any]) -> Iterator[Round]:
        """Yields the elements of each step of all ranks."""
        size, width = self._options.size, self._width
        windows = iter(lambda: list(itertools.islice(elements, width)), [])
        if self._options.steps is not None:
            # Nothing is read in advance: the rest belongs to the next epoch.
            yield from itertools.takewhile(lambda window: len(window) == width, windows)
            return
        previous: Round = []
        for window in windows:
            if self._options.remainder == "drop" and previous and len(window) < width:
                break
            if self._options.remainder == "uneven" and len(window) < size:
                previous = previous + window
                break
            if previous:
                yield previous
            previous = window
        if self._options.remainder == "drop":
            previous = previous[: len(previous) // size * size]
        yield previous

    def _portion(self, elements: Round) -> Any:
        """Returns the batch of this rank from the elements of a step of all ranks."""
        rank, size = self._options.rank, self._options.size
        mine = elements[rank::size]
        if self._options.remainder == "pad" and len(mine) < -(-len(elements) // size):
            mine = [*mine, elements[rank % len(elements)]]
        if self._per_batch is not None:
            return stacked(mine)
        if len(elements) > size:
            return _portion_of_rows(elements, rank, size)
        return mapped(as_array, mine[0])


def _portion_of_rows(batches: Round, rank: int, size: int) -> Any:
    """Returns an even share of the rows of several batches."""
    pooled = concatenated([mapped(as_array, batch) for batch in batches])
    count = len(next(leaves(pooled))[1])
    rows = np.arange(count * rank // size, count * (rank + 1) // size)
    return mapped(lambda array: array[rows], pooled)
