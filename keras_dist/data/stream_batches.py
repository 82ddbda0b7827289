"""Which elements of a stream make up the batches of one rank."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.nested import as_array, concatenated, leaves, mapped, stacked
from keras_dist.data.shard_options import ShardOptions

__all__ = ["StreamBatches"]

Round = list[Any]  # elements that follow each other, for one step of all ranks


class StreamBatches:
    """Which elements of a stream make up the batches of this rank.

    Args:
        options: options of `shard`.
        batch_size: single samples in each step on a rank; `None`: elements are batches.
        steps: batches in an epoch.
    """

    def __init__(self, options: ShardOptions, batch_size: int | None, steps: int):
        self.options, self.steps = options, steps
        self._batch_size = batch_size

    def of(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an epoch.

        Raises:
            DataError: the stream has ended before.
        """
        made = 0
        for each in itertools.islice(self._rounds(elements), self.steps):
            yield self._share(each)
            made += 1
        if made < self.steps:
            raise errors.DataError(
                self.options.explain(
                    f"data for {self.steps} steps on each of {self.options.size} ranks",
                    f"data that ended after {made}",
                    "Lower steps, or let the generator give as much each time.",
                )
            )

    def skip(self, elements: Iterator[Any], epochs: int) -> None:
        """Reads over what some epochs have taken."""
        count = epochs * self.steps * self.options.size * (self._batch_size or 1)
        next(itertools.islice(elements, count, count), None)

    def _rounds(self, elements: Iterator[Any]) -> Iterator[Round]:
        """Yields the elements of each step of all ranks."""
        size, width = self.options.size, self.options.size * (self._batch_size or 1)
        windows = iter(lambda: list(itertools.islice(elements, width)), [])
        if self.options.steps is not None:
            # Nothing is read before it is needed: the rest is that of the next epoch.
            yield from itertools.takewhile(lambda each: len(each) == width, windows)
            return
        before: Round = []
        for each in windows:
            if self.options.remainder == "drop" and before and len(each) < width:
                break
            if self.options.remainder == "uneven" and len(each) < size:
                before = before + each
                break
            if before:
                yield before
            before = each
        if self.options.remainder == "drop":
            before = before[: len(before) // size * size]
        yield before

    def _share(self, each: Round) -> Any:
        rank, size = self.options.rank, self.options.size
        mine = each[rank::size]
        if self.options.remainder == "pad" and len(mine) < -(-len(each) // size):
            mine = [*mine, each[rank % len(each)]]
        if self._batch_size is not None:
            return stacked(mine)
        if len(each) > size:
            return _share_of_rows(each, rank, size)
        return mapped(as_array, mine[0])


def _share_of_rows(batches: Round, rank: int, size: int) -> Any:
    """Returns an even share of the rows of several batches."""
    pooled = concatenated([mapped(as_array, batch) for batch in batches])
    count = len(next(leaves(pooled))[1])
    rows = np.arange(count * rank // size, count * (rank + 1) // size)
    return mapped(lambda array: array[rows], pooled)
