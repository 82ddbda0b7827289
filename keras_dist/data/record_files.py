"""TFRecord files, read by TensorFlow."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from keras_dist.data import consistency
from keras_dist.data.files import (
    FileIndex,
    Found,
    Paths,
    Unreadable,
    expanded,
    facts_of_files,
)
from keras_dist.data.partition import Remainder, Shuffle
from keras_dist.data.shard_options import Fact, ShardOptions, wrong_kind
from keras_dist.data.sharding import shard

Parse = Callable[[Any], Any]

HEAD_NBYTES = 12  # length and its checksum
CHECKSUM_NBYTES = 4


def tfrecord(
    files: Paths,
    parse: Parse,
    batch_size: int = 32,
    *,
    compression: Literal["GZIP", "ZLIB"] | None = None,
    shuffle: Shuffle = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    shuffle_buffer: int | None = None,
    unreadable: Unreadable = "raise",
) -> Any:
    """Returns this rank's batches of records in TFRecord files, for `fit`.

    Checks the files, then calls `shard` with a TFRecord reader: file i belongs to rank `i % size`.
    With fewer files than ranks, every rank reads all files, and record i belongs to rank
    `i % size`. Requires TensorFlow, with any Keras backend.

    Collective: every rank must call it with the same arguments. Blocks while each rank reads its
    files once, to check them and to count their records. An error on one rank is raised on all
    ranks.

    Args:
        files: a path, a pattern such as `"train/*.tfrecord"`, or a list of them.
        parse: function from a record, a scalar string tensor, to nested tuples and dicts of
            tensors; runs in a `tf.data` pipeline.
        batch_size: maximum number of samples per step on this rank. Defaults to 32.
        compression: `"GZIP"`, `"ZLIB"` or `None`. Defaults to `None`.
        shuffle: see `shard`; with `"global"` every rank reads all files. Defaults to True.
        seed: see `shard`. Defaults to 0.
        remainder: see `shard`. Defaults to `"uneven"`.
        steps: number of batches per epoch on each rank. Defaults to all.
        shuffle_buffer: see `shard`.
        unreadable: `"raise"` an error that names file and rank, or `"skip"` files that are missing
            or damaged when the data set is created, with a message on rank 0. Defaults to
            `"raise"`.

    Returns:
        A `tf.data.Dataset`.

    Raises:
        DataError: a file is missing or damaged, or there are too few records.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument has the wrong type.
        MismatchError: files or arguments differ across ranks.

    Example:
    ```python
    train = keras_dist.data.tfrecord("train/*.tfrecord", parse, batch_size=64)
    ```
    """

    def make_index() -> _RecordIndex:
        options = ShardOptions(
            batch_size, shuffle, seed, remainder, steps, shuffle_buffer=shuffle_buffer
        )
        if not callable(parse):
            raise wrong_kind("parse to be a function of a record", parse)
        paths = expanded(files)
        facts = [*facts_of_files(paths), Fact("compression", compression)]
        look = functools.partial(_look, compression)
        return _RecordIndex(look, paths, options, unreadable, facts)

    found = consistency.prepare(make_index)
    counts = dict(found)

    def reader(names: Sequence[str]) -> Any:
        import tensorflow as tf

        records = tf.data.TFRecordDataset(names, compression or "")
        return records.map(parse, tf.data.AUTOTUNE, deterministic=True).apply(
            tf.data.experimental.assert_cardinality(sum(counts[name] for name in names))
        )

    names = [name for name, _ in found]
    is_global = shuffle == "global"
    return shard(
        reader(names) if is_global else names,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        remainder=remainder,
        steps=steps,
        reader=None if is_global else reader,
        shuffle_buffer=shuffle_buffer,
    )


class _RecordIndex(FileIndex):
    """TFRecord files, checked."""

    def part(self, held: Sequence[Any]) -> list[tuple[str, int]]:
        """Returns each readable file with its number of records."""
        (found,) = self.found(held)
        return [(self.paths[number], each.lengths[0]) for number, each in found.items()]


def _look(compression: str | None, name: str) -> Found:
    import tensorflow as tf

    if compression is None and os.path.exists(name):
        _check_end(name)
    try:
        records = tf.data.TFRecordDataset(name, compression or "")
        count = int(records.reduce(np.int64(0), lambda count, _: count + 1))
    except tf.errors.OpError as failure:
        raise OSError(failure.message.splitlines()[0]) from failure
    return Found((count,), (), None)


def _check_end(name: str) -> None:
    """Raises if the last record is truncated; TensorFlow ignores a truncated record header."""
    nbytes, begin = os.path.getsize(name), 0
    with open(name, "rb") as file:
        while begin < nbytes:
            file.seek(begin)
            begin += HEAD_NBYTES + int.from_bytes(file.read(8), "little") + CHECKSUM_NBYTES
    if begin != nbytes:
        raise OSError("the file is truncated, or not a TFRecord file")
