"""Every way in which `keras_dist.data` takes data, with the numbers 0, 1, ... as samples.

What differs between sources is how they are made, and which of the documented ways of sharing out
data applies to them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pandas
import tensorflow as tf
import torch
from data_files import ROW_GROUP, decode, file_by_file, files, split, virtual

from keras_dist import data

__all__ = [
    "BATCH",
    "SOURCES",
    "Batches",
    "PyBatches",
    "Samples",
    "Source",
    "TorchSamples",
    "batches_in_turn",
    "in_batches",
]

BATCH = 3  # rows of a batch of sources of batches


# --- Data in memory


class Samples:
    """A random access source, as of grain: a length, and samples by index."""

    def __init__(self, total: int):
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Any:
        return {"x": np.float32(index), "y": (index, [index])}


class TorchSamples(torch.utils.data.Dataset):
    """A map-style data set of torch."""

    def __init__(self, total: int):
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]), index


class Batches:
    """Numbers in batches of 3; the last batch may be smaller."""

    def __init__(self, total: int):
        self.total = total

    def __len__(self) -> int:
        return -(-self.total // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = np.arange(BATCH * index, min(BATCH * (index + 1), self.total))
        return rows[:, None].astype("float32"), rows


class PyBatches(Batches, keras.utils.PyDataset):
    """The same batches as a `PyDataset`."""

    def __init__(self, total: int):
        keras.utils.PyDataset.__init__(self)
        self.total = total


def batches_in_turn(total: int) -> Iterator[Any]:
    """Yields the same batches."""
    return (Batches(total)[index] for index in range(len(Batches(total))))


def arrays(total: int) -> Any:
    """Returns nested arrays."""
    numbers = np.arange(total)
    pairs = np.stack([numbers, numbers], 1).astype("float32")
    return [numbers.astype(">i4"), {"a": pairs}], numbers.astype("int8")


def pipeline(total: int) -> tf.data.Dataset:
    """Returns a pipeline of nested samples."""
    return tf.data.Dataset.range(total).map(lambda number: ({"a": [number, 0]}, number))


# --- Data in files


def parse(record: tf.Tensor) -> Any:
    number = tf.strings.to_number(record, tf.int64)
    return number[None], number


def read_text(names: list[str]) -> tf.data.Dataset:
    return tf.data.TextLineDataset(names).map(parse)


def image_frame(lengths: tuple[int, ...]) -> tuple[pandas.DataFrame, str]:
    """Returns a list of images in the order of their numbers."""
    [folder, *_] = files("image", (sum(lengths),))
    numbers = np.arange(sum(lengths))
    names = [f"class {number % 3}/{number:03}.png" for number in numbers]
    return pandas.DataFrame({"filename": names, "class": numbers}), folder


# --- Pieces that belong to one rank


def one_by_one(lengths: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(np.arange(sum(lengths)), sum(lengths))


def in_batches(lengths: tuple[int, ...]) -> list[np.ndarray]:
    total = sum(lengths)
    return np.split(np.arange(total), range(BATCH, total, BATCH))


def in_row_groups(lengths: tuple[int, ...]) -> list[np.ndarray]:
    return [
        numbers[begin : begin + ROW_GROUP]
        for numbers in split(lengths)
        for begin in range(0, len(numbers), ROW_GROUP)
    ]


def class_by_class(lengths: tuple[int, ...]) -> list[np.ndarray]:
    numbers = np.arange(sum(lengths))
    return [numbers[n : n + 1] for n in np.argsort(numbers % 3, kind="stable")]


@dataclasses.dataclass(frozen=True)
class Source:
    """A way in which data comes in.

    Args:
        make: returns the data of this rank, given the numbers of samples of files, and options of
            `shard`.
        pieces: returns the numbers that go to one rank together: piece i to rank `i % size`; with
            fewer pieces than ranks number i. `None` if blocks of rows go to ranks.
        rest: how the remainder is shared out: of `"samples"`, of `"files"` of different lengths, or
            of batches that are `"pooled"`.
        ways: values of `shuffle`; `None` is not to pass it.
        has_batch_size: whether the source takes one.
        few_are_samples: whether the samples of files are shared out as samples with fewer files
            than ranks, or in a global order.
        is_resharded: whether the data can be shared out again among fewer ranks.
        shuffles: whether the data is shuffled if `shuffle` is not passed.
        is_stream: whether `steps` are full batches of what comes, which is not counted.
        as_pipeline: whether the first data of a test is a pipeline, as with Keras on TensorFlow;
            otherwise all are `PyDataset`s.
        label: returns the other arrays of a batch from the first.
        examples: the share of the examples to try: what is slow has few.
    """

    make: Callable[..., Any]
    pieces: Callable[[tuple[int, ...]], list[np.ndarray]] | None = one_by_one
    rest: str = "samples"
    ways: tuple[Any, ...] = (True, False, "global")
    has_batch_size: bool = True
    few_are_samples: bool = True
    is_resharded: bool = False
    shuffles: bool = False
    is_stream: bool = False
    as_pipeline: bool = False
    label: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers
    examples: float = 0.07

    def is_shuffled(self, shuffle: Any) -> bool:
        """Returns whether the data is shuffled with a value of `shuffle`."""
        return self.shuffles if shuffle is None else shuffle is not False

    def is_independent(self, shuffle: Any) -> bool:
        """Returns whether the order does not depend on the number of ranks."""
        in_turn = self.rest == "samples" and self.pieces is not None
        return shuffle == "global" or (in_turn and not self.is_shuffled(shuffle))


def of_total(make: Callable[[int], Any], **fixed: Any) -> Callable[..., Any]:
    """Returns a maker of the shard of data that has a total number of samples."""
    return lambda lengths, **options: data.shard(make(sum(lengths)), **fixed, **options)


def of_files(kind: str, function: Callable[..., Any], *names: Any, **fixed: Any) -> Any:
    """Returns a maker of the shard of files."""
    return lambda lengths, **options: function(files(kind, lengths), *names, **fixed, **options)


def of_shards(make: Callable[..., Any], pieces: Any = file_by_file, **fixed: Any) -> Source:
    return Source(make, pieces, rest="files", few_are_samples=False, **fixed)


def of_stream(make: Callable[..., Any], *arguments: Any, **fixed: Any) -> Source:
    return Source(make, *arguments, ways=(None,), is_stream=True, **fixed)


def of_rows(make: Callable[..., Any]) -> Source:
    return Source(make, None, is_resharded=True)


def of_pipeline(make: Callable[..., Any], *arguments: Any, **fixed: Any) -> Source:
    return Source(make, *arguments, **{"examples": 0.02} | fixed)


def image_directory(lengths: tuple[int, ...], **options: Any) -> Any:
    [folder, *_] = files("image", (sum(lengths),))
    return data.image_dataset(folder, (2, 3), color_mode="grayscale", **options)


def image_list(lengths: tuple[int, ...], **options: Any) -> Any:
    frame, folder = image_frame(lengths)
    return data.image_dataset(frame, (2, 3), label_mode="raw", directory=folder, **options)


SOURCES = {
    # Samples by index.
    "arrays": Source(of_total(arrays), is_resharded=True),
    "arrays as a pipeline": of_pipeline(of_total(arrays), as_pipeline=True),
    "frame": Source(
        of_total(lambda total: pandas.DataFrame({"a": np.arange(total), "b": 0})),
        is_resharded=True,
    ),
    "tensors": Source(
        of_total(lambda total: (torch.arange(total), tf.range(total))), is_resharded=True
    ),
    "samples": Source(of_total(Samples), is_resharded=True),
    "torch": Source(of_total(TorchSamples), is_resharded=True),
    "loader": Source(
        lambda lengths, batch_size, **options: data.shard(
            torch.utils.data.DataLoader(TorchSamples(sum(lengths)), batch_size), **options
        ),
        is_resharded=True,
    ),
    "shuffling loader of a list": Source(
        lambda lengths, batch_size, **options: data.shard(
            torch.utils.data.DataLoader(list(range(sum(lengths))), batch_size, shuffle=True),
            **options,
        ),
        ways=(None,),
        shuffles=True,
    ),
    "prefetched": Source(
        lambda lengths, **options: data.prefetch(data.shard(arrays(sum(lengths)), **options))
    ),
    # Batches by index.
    "PyDataset": Source(of_total(PyBatches), in_batches, has_batch_size=False, is_resharded=True),
    "batches": Source(
        of_total(Batches, batched=True),
        in_batches,
        has_batch_size=False,
        is_resharded=True,
    ),
    # In order.
    "generator": of_stream(of_total(lambda total: lambda: ((n, [n]) for n in range(total)))),
    "iterable": of_stream(of_total(lambda total: dict.fromkeys(range(total)).keys())),
    "generator of batches": of_stream(
        of_total(lambda total: lambda: batches_in_turn(total)),
        in_batches,
        rest="pooled",
        has_batch_size=False,
    ),
    # tf.data.
    "tf.data": of_pipeline(of_total(pipeline)),
    "tf.data, rebatched": of_pipeline(
        of_total(lambda total: pipeline(total).batch(4), batched=True),
        ways=(False, "global"),
        is_stream=True,
    ),
    "tf.data, shuffled": of_pipeline(
        of_total(lambda total: pipeline(total).shuffle(total)), ways=(None, "global"), shuffles=True
    ),
    "tf.data of batches": of_pipeline(
        of_total(lambda total: pipeline(total).batch(BATCH)),
        in_batches,
        rest="pooled",
        ways=(None,),
        has_batch_size=False,
    ),
    # Files.
    "text": of_pipeline(
        of_files("text", lambda names, **options: data.shard(names, reader=read_text, **options)),
        split,
        rest="files",
        ways=(True, False),
        is_stream=True,
    ),
    "tfrecord": of_pipeline(
        of_files("tfrecord", data.tfrecord, parse), split, rest="files", is_stream=True
    ),
    "npz": of_shards(of_files("npz", data.npz, "x", "y")),
    "npz as a pipeline": of_shards(
        of_files("npz", data.npz, "x", "y"), as_pipeline=True, examples=0.02
    ),
    "parquet": of_shards(of_files("parquet", data.parquet, ("x", ["a", "y"]), "y"), in_row_groups),
    "tar": of_shards(of_files("tar", data.tar, decode)),
    "images": of_shards(image_directory, class_by_class, label=lambda numbers: numbers % 3),
    "list of images": of_shards(image_list, one_by_one),
    "hdf5": of_rows(of_files("h5", data.hdf5, "x", "group/y", block=5)),
    "hdf5 in chunks": of_rows(of_files("h5", data.hdf5, "chunks", "x")),
    "virtual hdf5": of_rows(
        lambda lengths, **options: data.hdf5(virtual(lengths), "x", "y", **options)
    ),
    "npy": of_rows(
        lambda lengths, **options: data.npy(*files("npy", (sum(lengths),)) * 2, **options)
    ),
}
