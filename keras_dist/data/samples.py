"""Data that gives out single samples, or the user's own batches, when asked by number."""

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
    """A data set with a length, whose `data[i]` is sample i: an array, or several, nested.

    Args:
        data: the data set, the whole of it on every rank.
        terms: the terms on which to share it out.
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
    """A `keras.utils.PyDataset`, whose `data[i]` is batch i; batches are shared out whole.

    Args:
        data: the data set, the whole of it on every rank.
        terms: the terms on which to share it out.
    """

    def __init__(self, data: Any, terms: ShardOptions):
        no_reader("a PyDataset", terms)
        _no_batch_size("a PyDataset", terms)
        if terms.batched is False:
            raise errors.ArgumentError(
                terms.explain(
                    "no batched=False for a PyDataset",
                    "batched=False",
                    "Its elements are batches; leave it out.",
                )
            )
        self._data = data
        rows = SampleRows(data, True, terms)
        super().__init__(rows, terms, batch_size=1, of="batches")

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns this rank's batches, with the workers of the user's data set."""
        from keras_dist.data.array_dataset import ArrayDataset

        return ArrayDataset(self.batches, self._data)


class SampleRows:
    """The samples, or batches, of a data set with a length.

    Args:
        data: the data set.
        batched: whether what it gives are batches.
        terms: for messages.
    """

    def __init__(self, data: Any, batched: bool, terms: ShardOptions):
        self._data = data
        self._joined: Any = concatenated if batched else stacked
        self.total = _length(data, terms)
        if self.total == 0:
            terms.need_samples(0, "batches" if batched else "samples")
        first = mapped(as_array, self._joined([data[0]]))
        # Batches of text, say, are as long as their longest line.
        self.example = None if batched else first
        self.facts = [
            Fact("the kind of data", type(data).__name__, WHOLE),
            Fact("what its elements are", described(first), WHOLE),
        ]

    def take(self, indices: np.ndarray) -> Any:
        """Returns a batch of what the data set gives for these numbers."""
        return self._joined([self._data[int(index)] for index in indices])


def _length(data: Any, terms: ShardOptions) -> int:
    total = getattr(data, "num_batches", None) if not hasattr(data, "__len__") else len(data)
    # Data without an end has none, or the largest number there is.
    if total is None or total >= np.iinfo(np.int64).max:
        raise errors.DataError(
            terms.explain(
                "data with an end",
                f"a {type(data).__name__} without one",
                "Give it a length, or pass a function that makes a generator, and steps.",
            )
        )
    return int(total)


def _no_batch_size(data: str, terms: ShardOptions) -> None:
    remedy = "It makes the batches of a rank itself; let it make them as large as they are to be."
    terms.refuse(data, {"global_batch_size": remedy, "batch_size": remedy})
