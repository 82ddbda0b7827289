"""Lists of files, which all ranks compare, and their index: each rank inspects some files."""

import dataclasses
import glob
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.consistency import Compared, Source
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.nested import mapped
from keras_dist.data.shard_options import Fact, ShardOptions, check_choice, wrong_kind

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]  # a path, a glob pattern, or a list of them
Unreadable = Literal["raise", "skip"]

SORTED = "Pass the same files in the same order on every rank, as with sorted(files)."
NAMED = 5  # files that a message names


@dataclasses.dataclass(frozen=True)
class Found:
    """The contents of a file; `layout` has name, dtype and row shape of arrays, as in all files."""

    lengths: tuple[int, ...]
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    names: Any

    @property
    def example(self) -> Any:
        """Empty arrays in the structure of a batch."""
        arrays = {name: np.empty((0, *shape), dtype) for name, dtype, shape in self.layout}
        return mapped(lambda name: arrays[name], self.names)


class FileIndex:
    """Files, each inspected by one rank, or by those of which `mine` has it."""

    def __init__(
        self,
        look: Callable[[str], Any],
        paths: Sequence[str],
        options: ShardOptions,
        unreadable: Unreadable,
        facts: Sequence[Fact],
        own: bool = False,
        visible: bool = True,
        mine: slice | None = None,
    ):
        self.paths, self.options, self.own = paths, options, own
        remedy = "'raise' reports the file as an error, 'skip' skips it with a message."
        check_choice("unreadable", unreadable, get_args(Unreadable), remedy)
        self._unreadable = unreadable
        self.facts = [*facts, Fact("unreadable", unreadable), *options.facts()]
        if mine is None:
            mine = slice(None) if own else slice(options.rank, None, options.size)
        found = [self._attempt(look, path) for path in paths[mine]]
        opened = [self._attempt(_open, path) for path in paths] if visible else []
        missing = {n: reason for n, reason in enumerate(opened) if isinstance(reason, str)}
        self.held: Any = found, missing

    def found(self, held: Sequence[Any]) -> list[dict[int, Any]]:
        """Returns the contents of readable files by number: once, or with `own` for each rank."""
        by_rank = self._merged(held)
        everything = [each for found in by_rank for each in found.values()]
        bad = [each for each in everything if isinstance(each, str)]
        if len(bad) == len(everything):
            reason, remedy = " ".join(bad[:1]) or "none", "Check the paths on every node."
            raise errors.DataError("readable files", reason, remedy)
        if bad:
            more = f" And {len(bad) - NAMED} more." if len(bad) > NAMED else ""
            names = " ".join(bad[:NAMED])
            runtime.notify(f"keras_dist skips {len(bad)} files that cannot be read: {names}{more}")
        good = [{n: f for n, f in found.items() if not isinstance(f, str)} for found in by_rank]
        self._compare([(n, f) for found in good for n, f in found.items()])
        return good

    def _merged(self, held: Sequence[Any]) -> list[dict[int, Any]]:
        if self.own:
            return [dict(enumerate(found)) for found, _ in held]
        merged: dict[int, Any] = {}
        for rank, (found, _) in enumerate(held):
            merged |= {number * len(held) + rank: each for number, each in enumerate(found)}
        for _, missing in held:
            merged |= missing
        return [dict(sorted(merged.items()))]

    def _compare(self, good: Sequence[tuple[int, Any]]) -> None:
        number, first = good[0]
        for other, each in good:
            if each.layout != first.layout:
                raise errors.DataError(
                    f"rows of {self.paths[other]} to be {first.layout} as in {self.paths[number]}",
                    f"{each.layout}",
                    "Write all files with the same layout.",
                )

    def _attempt(self, look: Callable[[str], Any], path: str) -> Any:
        """Returns the result of `look`, or the text of the error."""
        try:
            return look(path)
        except Exception as failure:  # a damaged file may raise anything
            text = " ".join(str(failure).split()) or type(failure).__name__
            if not isinstance(failure, errors.DataError):
                received = f"{type(failure).__name__}: {text}"
                remedy = "Replace the file, or pass unreadable='skip'."
                text = str(errors.DataError(f"{path} to be readable", received, remedy))
            if self._unreadable == "raise":
                raise errors.DataError(text) from failure
            return text


def _open(path: str) -> None:
    with open(path, "rb"):
        pass


def expanded(paths: Paths) -> list[str]:
    """Expands patterns into paths."""
    found = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        if not isinstance(path, str | os.PathLike):
            raise wrong_kind("a path", path)
        name = os.fspath(path)
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        matches = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
        if not matches:
            remedy = "Check the path on every node."
            raise errors.DataError(f"files that match {name}", "none", remedy)
        found += matches
    if not found:
        raise errors.DataError("paths of files", "none", "Pass at least one.")
    return found


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


# --- Lists of files that `shard` takes


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
        return _names_of_rank(names, options)
    options = dataclasses.replace(options, batch_size=options.batch_size or DEFAULT_BATCH_SIZE)
    from keras_dist.data import tf_dataset

    facts = facts_of_files(names)
    if len(names) >= options.size:
        if options.way in ("global", "draw"):
            raise errors.ArgumentError(
                "one data set that all ranks read, for one order of all samples",
                f"{'sample()' if options.draws else 'shuffle=global'} with a list of files",
                "Pass reader(files), one tf.data.Dataset of all files, instead of the list.",
            )
        dataset = _read(names[options.rank :: options.size], options)
        return tf_dataset.FileSource(dataset, facts, options)
    dataset = _read(names, options)
    if options.steps is None:
        dataset = tf_dataset.with_length(dataset)
    source = tf_dataset.TfSource(dataset, dataclasses.replace(options, reader=None))
    source.facts[:0] = facts
    return source


def _names_of_rank(names: Sequence[str], options: ShardOptions) -> Compared:
    """Returns the names of this rank's files, which the user reads."""
    remedy = "Pass reader, a function from a list of file names to a tf.data.Dataset."
    reading = "batch_size global_batch_size batched shuffle steps shuffle_buffer draws".split()
    options.refuse("files without a reader", dict.fromkeys(reading, remedy))
    if len(names) < options.size:
        raise errors.DataError(
            f"at least {options.size} files, one for each rank",
            str(len(names)),
            "Pass reader to shard the elements in the files, or use more files or fewer ranks.",
        )
    facts = [*facts_of_files(names), *options.facts()]
    return Compared(facts, names[options.rank :: options.size])


def _read(names: Sequence[str], options: ShardOptions) -> Any:
    import tensorflow as tf

    dataset = options.reader(list(names)) if options.reader is not None else None
    if not isinstance(dataset, tf.data.Dataset):
        raise wrong_kind("reader to return a tf.data.Dataset", dataset)
    return dataset
