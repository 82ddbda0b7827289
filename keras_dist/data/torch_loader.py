"""Sharding of torch data sets and loaders by a sampler."""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
)

from keras_dist import errors
from keras_dist._compat.torch import draws, options_of
from keras_dist.data.arrays import length_of, no_reader
from keras_dist.data.indexed import SEEDED, WHOLE, IndexedBatches, IndexedSource
from keras_dist.data.nested import SomeRows, as_array, is_a
from keras_dist.data.shard_options import Fact, ShardOptions


class TorchSource(IndexedSource):
    """A torch `Dataset` with a length, or a `DataLoader` of one, whose settings are kept."""

    def __init__(self, data: Any, options: ShardOptions):
        no_reader("a torch Dataset", options)
        if options.batched:
            remedy = "Its elements are samples; leave out batched."
            options.refuse("a torch Dataset", {"batched": remedy})
        self._loader_options: dict[str, Any] = {}
        if isinstance(data, DataLoader):
            options = _as_loaded(data, options)
            self._loader_options = options_of(data)
            data = data.dataset
        self._data = data
        facts = [Fact("the kind of data", f"torch {type(data).__name__}", WHOLE)]
        super().__init__(length_of(data), None, None, facts, options)
        if not options.draws:
            self.facts.append(Fact("the data in memory", list(_held(data)), SEEDED))
        if not self._loader_options.get("in_order", True):
            self.epochs.not_restored = "a DataLoader with in_order=False"

    def part(self, held: Sequence[int | None]) -> DataLoader:
        """Returns a loader of the batches of this rank."""
        return DataLoader(
            self._data, batch_sampler=PartSampler(self.batches), **self._loader_options
        )


class PartSampler(torch.utils.data.Sampler):
    """Yields the indices of the samples of each step; every iteration is the next epoch."""

    def __init__(self, batches: IndexedBatches):
        self._batches = batches

    def __len__(self) -> int:
        return self._batches.plan.steps

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._batches.epochs.advance()
        for step in range(len(self)):
            yield self._batches.indices(epoch, step).tolist()


def _held(data: Any) -> Iterator[object]:
    """Yields indices, digested, and rows of the parts of a data set that hold them in memory."""
    if isinstance(data, Subset):
        with contextlib.suppress(AttributeError):  # a subclass may have none
            yield _indices(data.indices)
        yield from _held(data.dataset)
    elif isinstance(data, TensorDataset):
        # Of sparse, nested and quantized tensors there are no rows, or numpy cannot hold them.
        with contextlib.suppress(errors.ArgumentTypeError, RuntimeError, IndexError):
            rows = [len(data.tensors[0]) // 2, len(data.tensors[0]) - 1]
            yield SomeRows(tuple(as_array(tensor[rows]) for tensor in data.tensors), len(rows))
    elif isinstance(data, ConcatDataset | StackDataset):
        parts = data.datasets.values() if isinstance(data.datasets, dict) else data.datasets
        for part in parts:
            yield from _held(part)


def _indices(indices: Sequence[Any]) -> str:
    """Returns a text that differs where indices of a `Subset` do."""
    try:
        text = np.asarray(indices).tobytes()
    except ValueError:  # keys of several lengths
        text = repr(indices).encode()
    digest = hashlib.blake2b(text, digest_size=6).hexdigest()
    return f"a Subset of {len(indices)} indices from {indices[:3]!r} on, digest {digest}"


def every_nth_batch(loader: DataLoader, rank: int, size: int, steps: int | None) -> DataLoader:
    """Returns a loader of the batches of a whole data set that belong to one rank, in turn."""
    if loader.batch_sampler is None or _shuffles(loader.sampler):
        raise errors.ArgumentError(
            "a DataLoader of batches that keeps the order",
            f"a DataLoader with a {type(loader.sampler).__name__}",
            "Use shuffle=False and a batch_size.",
        )
    batches = list(itertools.islice(loader.batch_sampler, rank, steps, size))
    return DataLoader(loader.dataset, batch_sampler=batches, **options_of(loader))


def _shuffles(sampler: Any) -> bool:
    # The loader of torchdata that saves its state has a sampler of its own.
    return isinstance(sampler, RandomSampler) or is_a(sampler, "torchdata", "RandomSampler")


def _as_loaded(loader: DataLoader, options: ShardOptions) -> ShardOptions:
    """Returns the options, completed with the settings of the loader."""
    sampler = loader.sampler
    shuffles = _shuffles(sampler)
    known = isinstance(sampler, SequentialSampler) or (shuffles and not draws(sampler))
    if loader.batch_size is None or not known:
        own = loader.batch_sampler if loader.batch_size is None else sampler
        raise errors.ArgumentError(
            "a DataLoader that shuffles or keeps the order, with a batch_size",
            f"a DataLoader with a {type(own).__name__}",
            "Leave out the sampler, which shard() replaces, or pass the Dataset.",
        )
    shuffle = shuffles if options.shuffle is None else options.shuffle
    drops = loader.drop_last and options.remainder == "uneven"
    return dataclasses.replace(
        options,
        batch_size=loader.batch_size if options.batch_size is None else options.batch_size,
        global_batch_size=None,
        shuffle=shuffle,
        remainder="drop" if drops else options.remainder,
    )
