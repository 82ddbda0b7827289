"""Data sets with random access: `data[i]` is a sample, or a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist.data.arrays import no_reader
from keras_dist.data.indexed import WHOLE, IndexedSource
from keras_dist.data.nested import as_array, concatenated, described, mapped, stacked
from keras_dist.data.shard_options import Fact, ShardOptions


class SampleSource(IndexedSource):
    """A data set with a length whose `data[i]` is sample i: nested arrays."""

    def __init__(self, data: Any, options: ShardOptions):
        no_reader("data of single samples", options)
        batched = bool(options.batched)
        if batched:
            _no_batch_size("data whose elements are batches", options)
        rows = SampleRows(data, batched, options)
        if batched:
            super().__init__(rows, options, batch_size=1, of="batches")
        else:
            super().__init__(rows, options)


class PyDatasetSource(IndexedSource):
    """A `keras.utils.PyDataset`, whose `data[i]` is batch i: batch i belongs to rank `i % size`."""

    def __init__(self, data: Any, options: ShardOptions):
        no_reader("a PyDataset", options)
        _no_batch_size("a PyDataset", options)
        if options.batched is False:
            raise errors.ArgumentError(
                options.where,
                "no batched=False for a PyDataset",
                "batched=False",
                "Its elements are batches; omit the argument.",
            )
        self._data = data
        rows = SampleRows(data, True, options)
        super().__init__(rows, options, batch_size=1, of="batches")

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns this rank's batches, with the worker settings of the user's data set."""
        from keras_dist.data.array_dataset import ArrayDataset

        return ArrayDataset(self.batches, self._data)


class SampleRows:
    """The samples, or batches, of a data set with a length."""

    def __init__(self, data: Any, batched: bool, options: ShardOptions):
        self._data = data
        self._joined: Any = concatenated if batched else stacked
        self.total = _length(data, options)
        if self.total == 0:
            options.need_samples(0, "batches" if batched else "samples")
        first = mapped(as_array, self._joined([data[0]]))
        # Shapes may differ from batch to batch, as with padded text.
        self.example = None if batched else first
        self.facts = [
            Fact("the kind of data", type(data).__name__, WHOLE),
            Fact("what its elements are", described(first), WHOLE),
        ]

    def take(self, indices: np.ndarray) -> Any:
        """Returns one batch of the elements with these indices."""
        return self._joined([self._data[int(index)] for index in indices])


def _length(data: Any, options: ShardOptions) -> int:
    total = getattr(data, "num_batches", None) if not hasattr(data, "__len__") else len(data)
    # Infinite data has no length, or the largest integer.
    if total is None or total >= np.iinfo(np.int64).max:
        raise errors.DataError(
            options.where,
            "data with an end",
            f"a {type(data).__name__} without one",
            "Give it a length, or pass a function that returns a generator, and steps.",
        )
    return int(total)


def _no_batch_size(data: str, options: ShardOptions) -> None:
    remedy = "The data set makes the batches; set the batch size there."
    options.refuse(data, {"global_batch_size": remedy, "batch_size": remedy})
