"""Lists of files: each rank gets whole files, or elements if there are too few files."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from keras_dist import errors
from keras_dist.data.consistency import Source
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.partition import Spread, plan_spread
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = [
    "FileNames",
    "FileSource",
    "agreed_spread",
    "are_files",
    "facts_of_files",
    "facts_of_names",
    "source_of_files",
]

SORTED = "Give shard() the same files in the same order on every rank, as with sorted(files)."


def are_files(data: Any) -> bool:
    """Returns whether data is a list or tuple of file names or paths."""
    return (
        isinstance(data, list | tuple)
        and len(data) > 0
        and all(isinstance(name, str | os.PathLike) for name in data)
    )


def source_of_files(data: Sequence[str | os.PathLike[str]], terms: ShardOptions) -> Source:
    """Returns the source of a list of files: their names, or the elements of a reader.

    Args:
        data: names or paths, the complete list on every rank.
        terms: options of `shard`.

    Raises:
        ArgumentError: an option needs a reader.
        ArgumentTypeError: the reader does not return a `tf.data.Dataset`.
        DataError: there are too few files, or too few elements in them.
    """
    names = [os.fspath(name) for name in data]
    if terms.reader is None:
        return FileNames(names, terms)
    terms = dataclasses.replace(terms, batch_size=terms.batch_size or DEFAULT_BATCH_SIZE)
    if len(names) >= terms.size:
        return FileSource(names, terms)
    return _source_of_elements(names, terms)


class FileNames:
    """Files without a reader: each rank gets the names of its files.

    Args:
        names: all names.
        terms: options of `shard`.
    """

    held = None

    def __init__(self, names: Sequence[str], terms: ShardOptions):
        remedy = "Pass reader, a function from a list of file names to a tf.data.Dataset."
        reading = "batch_size global_batch_size batched shuffle steps shuffle_buffer draws".split()
        terms.refuse("files without a reader", dict.fromkeys(reading, remedy))
        if len(names) < terms.size:
            raise errors.DataError(
                terms.explain(
                    f"at least {terms.size} files, one for each rank",
                    str(len(names)),
                    "Pass reader, which shards the elements in the files, or use more files or "
                    "fewer ranks.",
                )
            )
        self._mine = list(names[terms.rank :: terms.size])
        self.facts = [*facts_of_files(names), *terms.facts()]

    def part(self, held: Sequence[int | None]) -> list[str]:
        """Returns the names of the files of this rank."""
        return self._mine


class FileSource:
    """Files of which each rank reads its own; ranks may have different numbers of elements.

    Args:
        names: all names, at least one for each rank.
        terms: options of `shard`, with a reader and a batch size.
    """

    def __init__(self, names: Sequence[str], terms: ShardOptions):
        from keras_dist.data.tf_dataset import count_elements
        from keras_dist.data.tf_shuffle import epochs_of

        _no_global_order(terms)
        self._terms = terms
        self._dataset = _read(names[terms.rank :: terms.size], terms)
        self.held = None if terms.steps else count_elements(self._dataset)
        if self.held is not None and self.held < 0:
            raise errors.DataError(
                terms.explain(
                    "finite data, or steps",
                    "a reader whose tf.data.Dataset is infinite",
                    "Leave out .repeat() in the reader, or pass steps.",
                )
            )
        self.facts = [*facts_of_files(names), *terms.facts()]
        self.epochs = epochs_of(self.facts, terms)
        self.epochs.global_batch = None  # ranks get files, not samples

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns the batches of this rank, planned from the numbers of elements of all ranks."""
        from keras_dist.data.tf_dataset import limited_batches, spread_batches

        terms, batch_size = self._terms, self._terms.batch_size or DEFAULT_BATCH_SIZE
        counts = [count for count in held if count is not None]
        if self.held is None:
            return limited_batches(self._dataset, terms, self.epochs, whole=False)
        spread = agreed_spread(counts, batch_size, terms)
        return spread_batches(self._dataset, self.held, spread, terms, self.epochs)


def _no_global_order(terms: ShardOptions) -> None:
    if terms.shuffle != "global" and not terms.draws:
        return
    raise errors.ArgumentError(
        terms.explain(
            "files that all ranks read, for one order of all data",
            f"{'sample()' if terms.draws else 'shuffle=global'} of files that each rank has alone",
            "Pass reader(files), one tf.data.Dataset of all files, instead of the list.",
        )
    )


def _source_of_elements(names: Sequence[str], terms: ShardOptions) -> Source:
    from keras_dist.data import tf_dataset

    dataset = _read(names, terms)
    if terms.steps is None:
        dataset = tf_dataset.with_length(dataset)
    source = tf_dataset.TfSource(dataset, dataclasses.replace(terms, reader=None))
    source.facts[:0] = facts_of_files(names)
    return source


def _read(names: Sequence[str], terms: ShardOptions) -> Any:
    import tensorflow as tf

    dataset = terms.reader(list(names)) if terms.reader is not None else None
    if not isinstance(dataset, tf.data.Dataset):
        raise terms.wrong_kind("reader to return a tf.data.Dataset", dataset)
    return dataset


def agreed_spread(counts: Sequence[int], batch_size: int, terms: ShardOptions) -> Spread:
    """Returns the plan of the batches of this rank from the numbers of elements of all ranks.

    Args:
        counts: number of elements of each rank.
        batch_size: largest number of elements of one rank in a step.
        terms: options of `shard`.

    Raises:
        DataError: a rank has too few elements; the text is the same on all ranks.
    """
    spread = plan_spread(counts, terms.rank, batch_size, terms.remainder)
    if spread is None:
        raise errors.DataError(
            terms.explain(
                f"an element for each of {-(-max(counts) // batch_size)} steps on each rank, the "
                f"steps of the rank with most elements",
                f"{counts} elements by rank",
                "Use files of similar length, a multiple of the number of ranks, a larger "
                "batch_size or remainder='pad'.",
            )
        )
    return spread


def facts_of_names(names: Sequence[str]) -> list[Fact]:
    """Returns the facts about names of files that must be equal on all ranks."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
    return [
        Fact("the kind of data", "a list of files", SORTED),
        Fact("the number of files", len(names), SORTED),
        Fact("the digest of the file names, in order,", digest, SORTED),
    ]


def facts_of_files(names: Sequence[str]) -> list[Fact]:
    """Returns the facts about files that must be equal on all ranks."""
    # The directory may differ between nodes, so only the last part is compared.
    return facts_of_names([PurePath(name).name for name in names])
