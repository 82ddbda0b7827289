"""TFRecord files, read by TensorFlow."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from keras_dist.data import consistency
from keras_dist.data.file_index import FileIndex, Found, Unreadable
from keras_dist.data.files import facts_of_files
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder
from keras_dist.data.paths import Paths, expanded
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.sharding import shard

__all__ = ["tfrecord"]

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
    """Generates the batches of this rank from records in TFRecord files, for `fit`.

    It is `shard` of the files, with a reader for TFRecord that checks them. File i belongs to rank
    `i % size`. With fewer files than ranks every rank reads all files, and record i belongs to rank
    `i % size`. Needs TensorFlow, on every backend of Keras.

    Collective: every rank, with the same arguments; blocks while each rank reads its files once, to
    count and check the records. An error on one rank is raised on all.

    Args:
        files: a path, a pattern such as `"train/*.tfrecord"`, or a list of them.
        parse: function from a record, a scalar string tensor, to nested tuples and dicts of
            tensors; it is traced into a tf.data pipeline.
        batch_size: largest number of samples of this rank in a step. Defaults to 32.
        compression: compression of the files, `"GZIP"` or `"ZLIB"`. Defaults to `None`.
        shuffle: see `shard`; for `"global"` every rank reads all files. Defaults to True.
        seed: see `shard`. Defaults to 0.
        remainder: see `shard`. Defaults to `"uneven"`.
        steps: number of batches in an epoch of each rank, to end it early. Defaults to all.
        shuffle_buffer: see `shard`.
        unreadable: `"raise"` an error that names file and rank, or `"skip"` files that are missing
            or damaged when the data set is made; rank 0 logs them. Defaults to `"raise"`.

    Returns:
        `tf.data.Dataset`.

    Raises:
        DataError: a file is missing or damaged, or there are too few records.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument is of the wrong type.
        MismatchError: the ranks have different files or arguments.

    Example:
    ```python
    train = keras_dist.data.tfrecord("train/*.tfrecord", parse, batch_size=64)
    ```
    """

    def survey() -> _RecordSurvey:
        terms = ShardOptions(
            batch_size, shuffle, seed, remainder, steps, shuffle_buffer=shuffle_buffer
        )
        if not callable(parse):
            raise terms.wrong_kind("parse to be a function of a record", parse)
        paths = expanded(files, terms)
        facts = [*facts_of_files(paths), Fact("compression", compression)]
        look = functools.partial(_look, compression)
        return _RecordSurvey(look, paths, terms, unreadable, facts)

    found = consistency.prepare(survey)
    counts = dict(found)

    def reader(names: Sequence[str]) -> Any:
        import tensorflow as tf

        records = tf.data.TFRecordDataset(names, compression or "")
        return records.map(parse, tf.data.AUTOTUNE, deterministic=True).apply(
            tf.data.experimental.assert_cardinality(sum(counts[name] for name in names))
        )

    names = [name for name, _ in found]
    reads_all = shuffle == "global"  # one order: every rank reads all files
    return shard(
        reader(names) if reads_all else names,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        remainder=remainder,
        steps=steps,
        reader=None if reads_all else reader,
        shuffle_buffer=shuffle_buffer,
    )


class _RecordSurvey(FileIndex):
    """Index of TFRecord files, which checks their records."""

    def part(self, held: Sequence[Any]) -> list[tuple[str, int]]:
        """Returns the readable files and their numbers of records."""
        (found,) = self.found(held)
        return [(self.paths[number], each.lengths[0]) for number, each in found.items()]


def _look(compression: str | None, name: str) -> Found:
    import tensorflow as tf

    try:
        return Found((_count(name, compression),), (), None)
    except tf.errors.OpError as failure:
        raise OSError(failure.message.splitlines()[0]) from failure


def _count(name: str, compression: str | None) -> int:
    import tensorflow as tf

    if compression is None and os.path.exists(name):
        _check_end(name)
    records = tf.data.TFRecordDataset(name, compression or "")
    return int(records.reduce(np.int64(0), lambda count, _: count + 1))


def _check_end(name: str) -> None:
    """Checks that the last record is complete; TensorFlow overlooks a cut in its header.

    Raises:
        OSError: the record is cut.
    """
    nbytes, begin = os.path.getsize(name), 0
    with open(name, "rb") as file:
        while begin < nbytes:
            file.seek(begin)
            begin += HEAD_NBYTES + int.from_bytes(file.read(8), "little") + CHECKSUM_NBYTES
    if begin != nbytes:
        raise OSError("it is truncated, or not a TFRecord file")
