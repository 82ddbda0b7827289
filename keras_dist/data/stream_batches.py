"""Selection of the elements of a stream that form the batches of a rank."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.nested import as_array, concatenated, leaves, mapped, stacked
from keras_dist.data.shard_options import ShardOptions

Round = list[Any]  # consecutive elements for one step of all ranks


class StreamBatches:
    """Selects the elements of a stream that form the batches of this rank."""

    def __init__(self, options: ShardOptions, batch_size: int | None, steps: int):
        self.options, self.steps = options, steps
        self._batch_size = batch_size

    def of(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an epoch."""
        made = 0
        for elements_of_step in itertools.islice(self._rounds(elements), self.steps):
            yield self._portion(elements_of_step)
            made += 1
        if made < self.steps:
            raise errors.DataError(
                self.options.where,
                f"data for {self.steps} steps on each of {self.options.size} ranks",
                f"data that ended after {made}",
                "Lower steps, or make the generator yield as many elements each time.",
            )

    def skip(self, elements: Iterator[Any], epochs: int) -> None:
        """Skips the elements of a number of epochs."""
        count = epochs * self.steps * self.options.size * (self._batch_size or 1)
        next(itertools.islice(elements, count, count), None)

    def _rounds(self, elements: Iterator[Any]) -> Iterator[Round]:
        """Yields the elements of each step of all ranks."""
        size, width = self.options.size, self.options.size * (self._batch_size or 1)
        windows = iter(lambda: list(itertools.islice(elements, width)), [])
        if self.options.steps is not None:
            # Nothing is read in advance: the rest belongs to the next epoch.
            yield from itertools.takewhile(lambda window: len(window) == width, windows)
            return
        previous: Round = []
        for window in windows:
            if self.options.remainder == "drop" and previous and len(window) < width:
                break
            if self.options.remainder == "uneven" and len(window) < size:
                previous = previous + window
                break
            if previous:
                yield previous
            previous = window
        if self.options.remainder == "drop":
            previous = previous[: len(previous) // size * size]
        yield previous

    def _portion(self, elements: Round) -> Any:
        """Returns the batch of this rank from the elements of a step of all ranks."""
        rank, size = self.options.rank, self.options.size
        mine = elements[rank::size]
        if self.options.remainder == "pad" and len(mine) < -(-len(elements) // size):
            mine = [*mine, elements[rank % len(elements)]]
        if self._batch_size is not None:
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
