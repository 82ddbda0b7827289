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
from keras_dist.data.files import FileIndex, Unreadable
from keras_dist.data.indexed import for_keras
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.partition import Plan
from keras_dist.data.readers import Column, FileReader, RowSegment, ScatteringReader
from keras_dist.data.shard_options import Fact, ShardOptions, check_choice, whole_number, wrong_kind

BLOCK_NBYTES = 16 << 20

Look = Callable[[str, Sequence[str]], list[RowSegment]]
MpiIo = Literal["independent"]

SAME = "Pass the same files and names, in the same order, on every rank."
SAME_FILES = "Copy the same files to all nodes."


@dataclasses.dataclass(frozen=True)
class RowFile:
    """The data sets of a file."""

    segments: Sequence[RowSegment]

    @property
    def layout(self) -> list[tuple[Any, ...]]:
        """Name, dtype and row shape of each data set, as in all files."""
        return [(each.name, each.dtype, each.shape) for each in self.segments]


class RowSource(FileIndex):
    """Data sets in files of which each rank reads its rows; ranks that read inspect all files."""

    def __init__(
        self,
        look: Look,
        files: Sequence[Any],
        data: Any,
        options: ShardOptions,
        block: int | None,
        mpi_io: MpiIo | None,
        readers: int | None,
        unreadable: Unreadable = "raise",
    ):
        _check_reading(block, mpi_io, readers, options)
        named = list(leaves(data, "data"))
        for label, name in [*named, *((f"file {n}", file) for n, file in enumerate(files))]:
            if not isinstance(name, str | os.PathLike):
                raise wrong_kind(f"{label} to be a name", name)
        if not named or not files:
            raise errors.DataError("files and names of data sets", "none", SAME)
        names, paths = [os.fspath(name) for _, name in named], list(map(os.fspath, files))
        self._data, self._block, self._mpi_io = data, block, mpi_io
        # The rank that reads for each rank: the first of its group.
        groups = [n * (readers or options.size) // options.size for n in range(options.size)]
        self._readers = [groups.index(group) for group in groups]
        basenames = "\n".join(PurePath(path).name for path in paths)
        digest = hashlib.blake2b(basenames.encode(), digest_size=8).hexdigest()
        facts = [
            Fact("the number of files", len(paths), SAME),
            Fact("the digest of the file names, in order,", digest, SAME),
            Fact("the names of the data sets", [PurePath(n).name for n in names], SAME),
            Fact("block", block),
            Fact("mpi_io", mpi_io),
            Fact("readers", readers),
        ]
        super().__init__(
            lambda path: RowFile(look(path, names)),
            paths,
            options,
            unreadable,
            facts,
            visible=False,
            mine=slice(None if self._readers[options.rank] == options.rank else 0),
        )

    def part(self, held: Sequence[Any]) -> Any:
        """Returns this rank's batches, from `held` of the ranks with access. Collective: all."""
        options = self.options
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
        options = self.options
        total = columns[0].shape[0]
        # Aligned with the chunks of the largest rows, which are the most expensive to read twice.
        widest = max(columns, key=lambda column: column.segments[0].row_nbytes)
        align = min(max(segment.align for segment in widest.segments), total)
        nbytes = sum(column.segments[0].row_nbytes for column in columns)
        kind = GlobalBlockShard if options.way == "global" else BlockShard
        batch_size = options.batch_size or 1
        # Rows of a window.
        per_step = batch_size * options.size if options.way == "global" else batch_size
        rows = self._block or block_length(total, nbytes, per_step, align, BLOCK_NBYTES)
        block = -(-rows // align) * align

        def share_of(plan: Plan, epoch: int) -> BlockShard:
            key = (options.seed, epoch) if options.shuffle else None
            return kind(ordered_blocks(total, block, align, key), block, plan, key)

        return share_of

    def _columns(self, held: Sequence[Any]) -> list[Column]:
        """Returns the columns as this rank reads them, or those that it is sent."""
        (good,) = self.found(held)
        mine, _ = held[self.options.rank]
        files = [mine[number] if mine else found for number, found in good.items()]
        columns = [Column(s) for s in zip(*(file.segments for file in files), strict=True)]
        if len({column.shape[0] for column in columns}) > 1:
            lengths = ", ".join(f"{c.segments[0].path} {c.shape[0]}" for c in columns)
            raise errors.DataError("files of equal length", lengths, "Cut them to the same length.")
        return columns

    def _merged(self, held: Sequence[Any]) -> list[dict[int, Any]]:
        """Returns each file as the first rank that reads has found it, the same as all others."""
        merged: dict[int, Any] = {}
        for number in range(len(self.paths)):
            found = {rank: files[number] for rank, (files, _) in enumerate(held) if files}
            bad = [each for each in found.values() if isinstance(each, str)]
            first = next(iter(found.values()))
            for rank, each in () if bad else found.items():
                _compare(first.segments, each.segments, rank, self.options.size)
            merged[number] = bad[0] if bad else first
        return [merged]

    def _scatters(self) -> bool:
        """Returns whether some ranks read for others."""
        return self._readers != list(range(self.options.size))

    def _reader(self, columns: Sequence[Column]) -> FileReader | ScatteringReader:
        if self._scatters():
            return ScatteringReader(columns, self._readers)
        if self._mpi_io is None:
            return FileReader(columns)
        for column in columns:
            for segment in column.segments:
                if segment.offset is None:
                    expected = f"a contiguous layout of {segment.name!r} in {segment.path}"
                    remedy = "Omit mpi_io, or write it without chunks and compression."
                    raise errors.DataError(
                        expected, "chunks, a virtual data set or no data", remedy
                    )
        comm = runtime.communicator()
        if comm.mpi is None:
            return FileReader(columns)
        return FileReader(columns, functools.partial(_engine.File, comm))


def _check_reading(
    block: object, mpi_io: object, readers: int | None, options: ShardOptions
) -> None:
    """Raises if an argument that says how rows are read is invalid."""
    if mpi_io == "collective":
        raise errors.ArgumentError(
            "mpi_io to be None or 'independent'",
            "'collective', which has been removed",
            "Pass mpi_io='independent', so that each rank reads its rows, or readers.",
        )
    choices = (None, *get_args(MpiIo))
    check_choice("mpi_io", mpi_io, choices, "See hdf5() for what each does.")
    whole_number("block", block)
    if (whole_number("readers", readers) or 1) > options.size:
        expected = f"readers to be 1 to {options.size}, the number of ranks"
        raise errors.ArgumentError(expected, str(readers), "Omit it.")
    if readers is not None and mpi_io is not None:
        expected, received, remedy = "readers or mpi_io, not both", "both", "Omit one of them."
        raise errors.ArgumentError(expected, received, remedy)
    if readers is not None and options.may_shrink:
        expected = "no rank that reads for others, as the others may go on without it"
        remedy = "Omit readers, so that each rank reads its rows."
        raise errors.ArgumentError(expected, f"readers={readers}", remedy)


def _compare(
    expected: Sequence[RowSegment], received: Sequence[RowSegment], rank: int, size: int
) -> None:
    """Raises the same error on all ranks if a rank found other data sets than the first rank."""
    for first, other in zip(expected, received, strict=True):
        if (first.length, first.dtype, first.shape) != (other.length, other.dtype, other.shape):
            raise errors.MismatchError(
                f"[rank {rank} of {size}]",
                f"{first.name or 'rows'!r} in {other.path} to have {first.length} rows of "
                f"{np.dtype(first.dtype)} {first.shape}, as on the first rank that reads",
                f"{other.length} rows of {np.dtype(other.dtype)} {other.shape}",
                SAME_FILES,
            )
