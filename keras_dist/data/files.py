"""Lists of files: file i belongs to rank i % size; with too few files, element i does."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from keras_dist import errors
from keras_dist.data.consistency import Source
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.spread import Spread, plan_spread

SORTED = "Pass the same files in the same order on every rank, as with sorted(files)."


def are_files(data: Any) -> bool:
    """Tells whether this is a list or tuple of file names or paths."""
    return (
        isinstance(data, list | tuple)
        and len(data) > 0
        and all(isinstance(name, str | os.PathLike) for name in data)
    )


def source_of_files(data: Sequence[str | os.PathLike[str]], options: ShardOptions) -> Source:
    """Returns the source that shards these files: by name, by file or by element."""
    names = [os.fspath(name) for name in data]
    if options.reader is None:
        return FileNames(names, options)
    options = dataclasses.replace(options, batch_size=options.batch_size or DEFAULT_BATCH_SIZE)
    if len(names) >= options.size:
        return FileSource(names, options)
    return _source_of_elements(names, options)


class FileNames:
    """Files that the user reads: each rank receives the names of its files."""

    held = None

    def __init__(self, names: Sequence[str], options: ShardOptions):
        remedy = "Pass reader, a function from a list of file names to a tf.data.Dataset."
        reading = "batch_size global_batch_size batched shuffle steps shuffle_buffer draws".split()
        options.refuse("files without a reader", dict.fromkeys(reading, remedy))
        if len(names) < options.size:
            raise errors.DataError(
                options.where,
                f"at least {options.size} files, one for each rank",
                str(len(names)),
                "Pass reader to shard the elements in the files, or use more files or fewer ranks.",
            )
        self._mine = list(names[options.rank :: options.size])
        self.facts = [*facts_of_files(names), *options.facts()]

    def part(self, held: Sequence[int | None]) -> list[str]:
        """Returns the names of this rank's files."""
        return self._mine


class FileSource:
    """Files of which each rank reads its own; the number of elements may differ by rank."""

    def __init__(self, names: Sequence[str], options: ShardOptions):
        from keras_dist.data.tf_caches import held_files, with_own_cache
        from keras_dist.data.tf_dataset import count_elements
        from keras_dist.data.tf_shuffle import epochs_of

        _no_global_order(options)
        self._options = options
        read = _read(names[options.rank :: options.size], options)
        self._dataset = with_own_cache(read, options)
        self._count = None if options.steps else count_elements(self._dataset)
        self.held = self._count, held_files(self._dataset, complete=True)
        if self._count is not None and self._count < 0:
            raise errors.DataError(
                options.where,
                "data with an end, or steps",
                "a reader whose tf.data.Dataset has no end",
                "Remove .repeat() from the reader, or pass steps.",
            )
        self.facts = [*facts_of_files(names), *options.facts()]
        self.epochs = epochs_of(self.facts, options)
        self.epochs.global_batch = None  # files are sharded, not samples

    def part(self, held: Sequence[tuple[int | None, Any]]) -> Any:
        """Returns this rank's batches, given the number of elements of each rank."""
        from keras_dist.data.tf_caches import with_own_caches
        from keras_dist.data.tf_dataset import limited_batches, spread_batches

        options, batch_size = self._options, self._options.batch_size or DEFAULT_BATCH_SIZE
        dataset = with_own_caches(self._dataset, [files for _, files in held], options)
        counts = [count for count, _ in held if count is not None]
        if self._count is None:
            return limited_batches(dataset, options, self.epochs, whole=False)
        spread = agreed_spread(counts, batch_size, options)
        return spread_batches(dataset, self._count, spread, options, self.epochs)


def _no_global_order(options: ShardOptions) -> None:
    if options.shuffle != "global" and not options.draws:
        return
    raise errors.ArgumentError(
        options.where,
        "one data set that all ranks read, for one order of all samples",
        f"{'sample()' if options.draws else 'shuffle=global'} with a list of files",
        "Pass reader(files), one tf.data.Dataset of all files, instead of the list.",
    )


def _source_of_elements(names: Sequence[str], options: ShardOptions) -> Source:
    from keras_dist.data import tf_dataset

    dataset = _read(names, options)
    if options.steps is None:
        dataset = tf_dataset.with_length(dataset)
    source = tf_dataset.TfSource(dataset, dataclasses.replace(options, reader=None))
    source.facts[:0] = facts_of_files(names)
    return source


def _read(names: Sequence[str], options: ShardOptions) -> Any:
    import tensorflow as tf

    dataset = options.reader(list(names)) if options.reader is not None else None
    if not isinstance(dataset, tf.data.Dataset):
        raise options.wrong_kind("reader to return a tf.data.Dataset", dataset)
    return dataset


def agreed_spread(counts: Sequence[int], batch_size: int, options: ShardOptions) -> Spread:
    """Plans this rank's batches from the number of elements of each rank."""
    spread = plan_spread(counts, options.rank, batch_size, options.remainder)
    if spread is None:
        raise errors.DataError(
            options.where,
            f"files with elements for {-(-max(counts) // batch_size)} steps on each rank, as "
            f"on the rank with the most elements",
            f"{counts} elements by rank",
            "Use files of similar length, their number a multiple of the number of ranks, "
            "or a larger batch_size, or remainder='pad'.",
        )
    return spread


def facts_of_names(names: Sequence[str]) -> list[Fact]:
    """Returns the facts about file names on which all ranks must agree."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
    return [
        Fact("the kind of data", "a list of files", SORTED),
        Fact("the number of files", len(names), SORTED),
        Fact("the digest of the file names, in order,", digest, SORTED),
    ]


def facts_of_files(names: Sequence[str]) -> list[Fact]:
    """Returns the facts about files on which all ranks must agree."""
    # The directory of a data set may differ by node, so the last part of a path counts.
    return facts_of_names([PurePath(name).name for name in names])
