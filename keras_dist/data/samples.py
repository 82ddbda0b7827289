"""Data sets with a length, whose items are samples or batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.arrays import no_reader
from keras_dist.data.indexed import WHOLE, IndexedSource
from keras_dist.data.nested import as_array, concatenated, described, mapped, stacked
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["PyDatasetSource", "SampleRows", "SampleSource"]


class SampleSource(IndexedSource):
    """A data set whose item `data[i]` is sample i, a nested structure of arrays.

    Args:
        data: the complete data set, on every rank.
        terms: options of `shard`.
    """

    def __init__(self, data: Any, terms: ShardOptions):
        no_reader("data of single samples", terms)
        batched = bool(terms.batched)
        if batched:
            _no_batch_size("data whose elements are batches", terms)
        rows = SampleRows(data, batched, terms)
        if batched:
            super().__init__(rows, terms, batch_size=1, of="batches")
        else:
            super().__init__(rows, terms)


class PyDatasetSource(IndexedSource):
    """A `keras.utils.PyDataset`, whose item `data[i]` is batch i; ranks get whole batches.

    Args:
        data: the complete data set, on every rank.
        terms: options of `shard`.
    """

    def __init__(self, data: Any, terms: ShardOptions):
        no_reader("a PyDataset", terms)
        _no_batch_size("a PyDataset", terms)
        if terms.batched is False:
            raise errors.ArgumentError(
                terms.explain(
                    "no batched=False for a PyDataset",
                    "batched=False",
                    "Its items are batches; leave it out.",
                )
            )
        self._data = data
        rows = SampleRows(data, True, terms)
        super().__init__(rows, terms, batch_size=1, of="batches")

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns the batches of this rank, with the workers of the user's data set."""
        from keras_dist.data.array_dataset import ArrayDataset

        return ArrayDataset(self.batches, self._data)


class SampleRows:
    """The items of a data set with a length.

    Args:
        data: the data set.
        batched: whether its items are batches.
        terms: options of `shard`, for messages.
    """

    def __init__(self, data: Any, batched: bool, terms: ShardOptions):
        self._data = data
        self._joined: Any = concatenated if batched else stacked
        self.total = _length(data, terms)
        if self.total == 0:
            terms.need_samples(0, "batches" if batched else "samples")
        first = mapped(as_array, self._joined([data[0]]))
        # Batches may differ in shape: those of text are as long as their longest line.
        self.example = None if batched else first
        self.facts = [
            Fact("the kind of data", type(data).__name__, WHOLE),
            Fact("what its elements are", described(first), WHOLE),
        ]

    def take(self, indices: np.ndarray) -> Any:
        """Returns a batch of the items with these indices."""
        return self._joined([self._data[int(index)] for index in indices])


def _length(data: Any, terms: ShardOptions) -> int:
    total = getattr(data, "num_batches", None) if not hasattr(data, "__len__") else len(data)
    # Endless data has no length, or the largest number.
    if total is None or total >= np.iinfo(np.int64).max:
        raise errors.DataError(
            terms.explain(
                "data with a length",
                f"a {type(data).__name__} without one",
                "Define its length, or pass a function that returns a generator, and steps.",
            )
        )
    return int(total)


def _no_batch_size(data: str, terms: ShardOptions) -> None:
    remedy = "The data set makes the batches itself; set their size there."
    terms.refuse(data, {"global_batch_size": remedy, "batch_size": remedy})
