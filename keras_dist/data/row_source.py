"""Data sets of rows in HDF5 and `.npy` files, of which each rank reads its own blocks."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.data.blocks import (
    BlockBatches,
    BlockShard,
    GlobalBlockShard,
    block_length,
    ordered_blocks,
)
from keras_dist.data.epochs import kind_of
from keras_dist.data.files import Unreadable
from keras_dist.data.indexed import for_keras
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.partition import Plan
from keras_dist.data.readers import Column, FileReader, RowSegment, ScatteringReader
from keras_dist.data.shard_options import Fact, ShardOptions

BLOCK_NBYTES = 16 << 20

Look = Callable[[str, Sequence[str]], list[RowSegment]]
MpiIo = Literal["independent"]

SAME = "Pass the same files and names, in the same order, on every rank."
SAME_FILES = "Copy the same files to all nodes."


@dataclasses.dataclass(frozen=True)
class ReadMethod:
    """How rows are read: arguments of `hdf5` and `npy`."""

    block: int | None
    mpi_io: MpiIo | None
    readers: int | None
    unreadable: Unreadable = "raise"

    def check(self, options: ShardOptions) -> None:
        """Raises if an argument is invalid."""
        removed: object = self.mpi_io
        if removed == "collective":
            raise options.argument_error(
                "mpi_io to be None or 'independent'",
                "'collective', which has been removed",
                "Pass mpi_io='independent', so that each rank reads its rows, or readers.",
            )
        remedy = "See hdf5() for what each does."
        options.check_choice("mpi_io", self.mpi_io, (None, *get_args(MpiIo)), remedy)
        options.check_choice("unreadable", self.unreadable, get_args(Unreadable), remedy)
        options.count("block", self.block)
        if (options.count("readers", self.readers) or 1) > options.size:
            expected = f"readers to be 1 to {options.size}, the number of ranks"
            raise options.argument_error(expected, str(self.readers), "Omit it.")
        if self.readers is not None and self.mpi_io is not None:
            expected, received, remedy = "readers or mpi_io, not both", "both", "Omit one of them."
            raise options.argument_error(expected, received, remedy)
        if self.readers is not None and options.may_shrink:
            expected = "no rank that reads for others, as the others may go on without it"
            remedy = "Omit readers, so that each rank reads its rows."
            received = f"readers={self.readers}"
            raise options.argument_error(expected, received, remedy)


class RowSource:
    """Data sets in files of which each rank reads its rows."""

    def __init__(
        self,
        look: Look,
        files: Sequence[Any],
        data: Any,
        method: ReadMethod,
        options: ShardOptions,
    ):
        method.check(options)
        named = list(leaves(data, "data"))
        for label, name in [*named, *((f"file {n}", file) for n, file in enumerate(files))]:
            if not isinstance(name, str | os.PathLike):
                raise options.wrong_kind(f"{label} to be a name", name)
        if not named or not files:
            raise options.data_error("files and names of data sets", "none", SAME)
        names = [os.fspath(name) for _, name in named]
        self._paths = [os.fspath(file) for file in files]
        self._data, self._method, self._options = data, method, options
        # The rank that reads for each rank: the first of its group.
        groups = [n * (method.readers or options.size) // options.size for n in range(options.size)]
        self._readers = [groups.index(group) for group in groups]
        basenames = "\n".join(PurePath(path).name for path in self._paths)
        digest = hashlib.blake2b(basenames.encode(), digest_size=8).hexdigest()
        self.facts = [
            Fact("the number of files", len(files), SAME),
            Fact("the digest of the file names, in order,", digest, SAME),
            Fact("the names of the data sets", [PurePath(n).name for n in names], SAME),
            *(Fact(name, value) for name, value in vars(method).items()),
            *options.facts(),
        ]
        self.held: Any = None
        if self._readers[options.rank] == options.rank:
            self.held = [self._attempt(look, path, names) for path in self._paths]

    def _attempt(self, look: Look, path: str, names: Sequence[str]) -> list[RowSegment] | str:
        try:
            return look(path, names)
        except errors.DataError as failure:
            if self._method.unreadable == "raise":
                raise
            return str(failure)

    def part(self, held: Sequence[Any]) -> Any:
        """Returns this rank's batches, from `held` of the ranks with access. Collective: all."""
        options = self._options
        columns = self._columns(held)
        total = columns[0].shape[0]
        batch_size = options.batch_size or 1
        plan = options.epoch_plan(total, batch_size)
        facts = [*self.facts, Fact("lengths", [column.shape for column in columns])]
        each = iter(columns)
        is_global = options.way == "global"
        batches = BlockBatches(
            mapped(lambda _: next(each), self._data),
            self._reader(columns),
            self._share_of(columns),
            plan,
            kind_of(options.lasting(facts)),
            plan.batch_size * plan.size if is_global else None,
            options.plans_after_loss(total, batch_size, plan.steps),
        )
        self.epochs = batches.epochs
        return for_keras(batches, ahead=not self._scatters())

    def _share_of(self, columns: Sequence[Column]) -> Callable[[Plan, int], BlockShard]:
        """Returns the function that cuts the rows of an epoch into blocks for a plan."""
        options, method = self._options, self._method
        total = columns[0].shape[0]
        # Aligned with the chunks of the largest rows, which are the most expensive to read twice.
        widest = max(columns, key=lambda column: column.segments[0].row_nbytes)
        align = min(max(segment.align for segment in widest.segments), total)
        nbytes = sum(column.segments[0].row_nbytes for column in columns)
        kind = GlobalBlockShard if options.way == "global" else BlockShard
        batch_size = options.batch_size or 1
        # Rows of a window.
        per_step = batch_size * options.size if options.way == "global" else batch_size
        rows = method.block or block_length(total, nbytes, per_step, align, BLOCK_NBYTES)
        block = -(-rows // align) * align

        def share_of(plan: Plan, epoch: int) -> BlockShard:
            key = (options.seed, epoch) if options.shuffle else None
            return kind(ordered_blocks(total, block, align, key), block, plan, key)

        return share_of

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
                raise self._options.data_error("a readable file", reasons, "Check these files.")
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
            raise self._options.data_error(
                "files of equal length", lengths, "Cut them to the same length."
            )
        return columns

    def _compare_files(self, files: Sequence[Sequence[RowSegment]]) -> None:
        for file in files:
            for first, other in zip(files[0], file, strict=True):
                if (first.dtype, first.shape) != (other.dtype, other.shape):
                    raise self._options.data_error(
                        f"rows of {other.name!r} in {other.path} to be as in {first.path}",
                        f"{_describe(other)} instead of {_describe(first)}",
                        "Convert them to one dtype and shape.",
                    )

    def _scatters(self) -> bool:
        """Returns whether some ranks read for others."""
        return self._readers != list(range(self._options.size))

    def _reader(self, columns: Sequence[Column]) -> FileReader | ScatteringReader:
        if self._scatters():
            return ScatteringReader(columns, self._readers)
        if self._method.mpi_io is None:
            return FileReader(columns)
        for column in columns:
            for segment in column.segments:
                if segment.offset is None:
                    expected = f"a contiguous layout of {segment.name!r} in {segment.path}"
                    remedy = "Omit mpi_io, or write it without chunks and compression."
                    raise self._options.data_error(
                        expected, "chunks, a virtual data set or no data", remedy
                    )
        comm = runtime.communicator()
        if comm.mpi is None:
            return FileReader(columns)
        return FileReader(columns, functools.partial(_engine.File, comm))


def _compare(
    expected: Sequence[RowSegment], received: Sequence[RowSegment], rank: int, size: int
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


def _describe(segment: RowSegment) -> str:
    return f"{np.dtype(segment.dtype)} {segment.shape}"
