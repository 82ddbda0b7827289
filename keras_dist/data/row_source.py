"""Data sets of rows in HDF5 and `.npy` files, of which each rank reads its own blocks."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.data.batches import for_keras
from keras_dist.data.block_batches import BlockBatches, Cut
from keras_dist.data.blocks import block_length
from keras_dist.data.epochs import kind_of
from keras_dist.data.indexed import plan_for
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.read_method import ReadMethod
from keras_dist.data.readers import FileReader, Reader
from keras_dist.data.scattering import ScatteringReader
from keras_dist.data.segments import Column, Segment
from keras_dist.data.shard_options import Fact

BLOCK_NBYTES = 16 << 20

Look = Callable[[str, Sequence[str]], list[Segment]]

SAME = "Pass the same files and names, in the same order, on every rank."
SAME_FILES = "Copy the same files to all nodes."


class RowSource:
    """Data sets in files of which each rank reads its rows."""

    def __init__(self, look: Look, files: Sequence[Any], data: Any, method: ReadMethod):
        options = method.options
        named = list(leaves(data, "data"))
        for label, name in [*named, *((f"file {n}", file) for n, file in enumerate(files))]:
            if not isinstance(name, str | os.PathLike):
                raise options.wrong_kind(f"{label} to be a name", name)
        if not named or not files:
            raise errors.DataError(options.where, "files and names of data sets", "none", SAME)
        names = [os.fspath(name) for _, name in named]
        self._paths = [os.fspath(file) for file in files]
        self._data, self._method, self._options = data, method, options
        self._readers = method.readers_of_ranks()
        basenames = [PurePath(path).name for path in self._paths]
        self.facts = [
            Fact("the number of files", len(files), SAME),
            Fact("the digest of the file names, in order,", _digest(basenames), SAME),
            Fact("the names of the data sets", [PurePath(n).name for n in names], SAME),
            *method.facts(),
            *options.facts(),
        ]
        self.held: Any = None
        if self._readers[options.rank] == options.rank:
            self.held = [self._attempt(look, path, names) for path in self._paths]

    def _attempt(self, look: Look, path: str, names: Sequence[str]) -> list[Segment] | str:
        try:
            return look(path, names)
        except errors.DataError as failure:
            if self._method.unreadable == "raise":
                raise
            return str(failure)

    def part(self, held: Sequence[Any]) -> Any:
        """Returns this rank's batches, given `held` of all ranks; `None` on ranks without access.

        Collective: every rank.
        """
        options = self._options
        columns = self._columns(held)
        total = columns[0].shape[0]
        options.need_samples(total)
        batch_size = options.batch_size or 1
        plan = options.plan(total, batch_size)
        options.need_steps(plan.steps)
        plan = plan.limited(options.steps or plan.steps)
        facts = [*self.facts, Fact("lengths", [column.shape for column in columns])]
        plan_of = functools.partial(plan_for, total, options, batch_size, plan.steps)
        each = iter(columns)
        batches = BlockBatches(
            mapped(lambda _: next(each), self._data),
            self._reader(columns),
            self._cut(columns),
            plan,
            kind_of(options.lasting(facts)),
            plan_of if options.may_shrink else None,
        )
        self.epochs = batches.epochs
        return for_keras(batches, ahead=not self._scatters())

    def _cut(self, columns: Sequence[Column]) -> Cut:
        """Returns how the rows are cut into blocks."""
        options, method = self._options, self._method
        total = columns[0].shape[0]
        # Aligned with the chunks of the largest rows, which are the most expensive to read twice.
        widest = max(columns, key=lambda column: column.segments[0].row_nbytes)
        align = min(max(segment.align for segment in widest.segments), total)
        nbytes = sum(column.segments[0].row_nbytes for column in columns)
        is_global = options.shuffle == "global"
        batch_size = options.batch_size or 1
        per_step = batch_size * options.size if is_global else batch_size  # rows of a window
        rows = method.block or block_length(total, nbytes, per_step, align, BLOCK_NBYTES)
        block = -(-rows // align) * align
        seed = options.seed if options.shuffle else None
        return Cut(total, block, align, seed, is_global)

    def _columns(self, held: Sequence[Any]) -> list[Column]:
        """Returns the columns as this rank reads them."""
        indexes = {rank: index for rank, index in enumerate(held) if index is not None}
        bad = {
            number: found
            for index in indexes.values()
            for number, found in enumerate(index)
            if isinstance(found, str)
        }
        good = [number for number in range(len(self._paths)) if number not in bad]
        if bad:
            reasons = "; ".join(bad.values())
            if not good:
                raise self._error("a readable file", reasons, "Check these files.")
            runtime.notify(
                f"keras_dist skips {len(bad)} of {len(self._paths)} files that cannot be read: "
                f"{reasons}"
            )
        first = next(iter(indexes.values()))
        for rank, index in indexes.items():
            for number in good:
                _compare(first[number], index[number], rank, self._options.size)
        self._compare_files([first[number] for number in good])
        mine = indexes.get(self._options.rank, first)
        columns = [Column(segments) for segments in zip(*(mine[n] for n in good), strict=True)]
        if len({column.shape[0] for column in columns}) > 1:
            lengths = ", ".join(f"{c.segments[0].path} {c.shape[0]}" for c in columns)
            raise self._error("files of equal length", lengths, "Cut them to the same length.")
        return columns

    def _compare_files(self, files: Sequence[Sequence[Segment]]) -> None:
        for file in files:
            for first, other in zip(files[0], file, strict=True):
                if (first.dtype, first.shape) != (other.dtype, other.shape):
                    raise self._error(
                        f"rows of {other.name!r} in {other.path} to be as in {first.path}",
                        f"{_describe(other)} instead of {_describe(first)}",
                        "Convert them to one dtype and shape.",
                    )

    def _scatters(self) -> bool:
        """Returns whether some ranks read for others."""
        return self._readers != list(range(self._options.size))

    def _reader(self, columns: Sequence[Column]) -> Reader:
        """Returns the reader of the rows."""
        if self._scatters():
            return ScatteringReader(columns, self._readers)
        if self._method.mpi_io is None:
            return FileReader(columns)
        for column in columns:
            for segment in column.segments:
                if segment.offset is None:
                    expected = f"a contiguous layout of {segment.name!r} in {segment.path}"
                    remedy = "Omit mpi_io, or write it without chunks and compression."
                    raise self._error(expected, "chunks, a virtual data set or no data", remedy)
        comm = runtime.communicator()
        if comm.mpi is None:
            return FileReader(columns)
        return FileReader(columns, functools.partial(_engine.File, comm))

    def _error(self, expected: str, received: str, remedy: str) -> errors.DataError:
        return errors.DataError(self._options.where, expected, received, remedy)


def _compare(
    expected: Sequence[Segment], received: Sequence[Segment], rank: int, size: int
) -> None:
    """Raises the same error on all ranks if a rank found other data sets than the first rank."""
    for first, other in zip(expected, received, strict=True):
        if (first.length, first.dtype, first.shape) != (other.length, other.dtype, other.shape):
            raise errors.MismatchError(
                f"[rank {rank} of {size}]",
                f"{first.name or 'rows'!r} in {other.path} to have {first.length} rows of "
                f"{_describe(first)}, as on the first rank that reads",
                f"{other.length} rows of {_describe(other)}",
                SAME_FILES,
            )


def _describe(segment: Segment) -> str:
    return f"{np.dtype(segment.dtype)} {segment.shape}"


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
