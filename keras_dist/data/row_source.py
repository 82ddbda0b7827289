"""Data sets in files: the layout that all ranks agree on, and the ranks that read."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.batches import for_keras
from keras_dist.data.block_batches import BlockBatches, Cut
from keras_dist.data.blocks import block_length
from keras_dist.data.epochs import kind_of
from keras_dist.data.indexed import plan_among
from keras_dist.data.nested import leaves, mapped
from keras_dist.data.partition import plan_samples
from keras_dist.data.readers import CollectiveReader, FileReader, Reader, RemoteReader, through_mpi
from keras_dist.data.segments import Column, Segment
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["MpiIo", "ReadMethod", "RowSource", "Unreadable"]

BLOCK_NBYTES = 16 << 20
MAX_NBYTES = 1 << 30  # that MPI reads or sends at once

MpiIo = Literal["independent", "collective"]
Unreadable = Literal["raise", "skip"]
Inspect = Callable[[str, Sequence[str]], list[Segment]]

SAME = "Pass the same files and names, in the same order, on every rank."
SAME_FILES = "Copy the same files to all nodes."


@dataclasses.dataclass(frozen=True)
class ReadMethod:
    """How rows are read: the arguments of `hdf5`, checked.

    Args:
        block: number of rows to read at once.
        mpi_io: how MPI reads, if it does.
        readers: number of ranks that read.
        unreadable: what to do with files that cannot be read.
        terms: options of the data set.

    Raises:
        ArgumentError: an argument has an invalid value, or excludes another one.
        ArgumentTypeError: an argument is of the wrong type.
    """

    block: int | None
    mpi_io: MpiIo | None
    readers: int | None
    unreadable: Unreadable
    terms: ShardOptions

    def __post_init__(self) -> None:
        terms = self.terms
        self._one_of("mpi_io", (None, *get_args(MpiIo)))
        self._one_of("unreadable", get_args(Unreadable))
        for name, most in (("block", None), ("readers", terms.size)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise terms.wrong_kind(f"{name} to be an integer", value)
            if value < 1 or (most is not None and value > most):
                limits = f"1 to {most}, the number of ranks" if most else "at least 1"
                raise self._error(f"{name} to be {limits}", str(value), "Leave it out.")
        if self.readers is not None and self.mpi_io is not None:
            remedy = "Leave one of them out."
            raise self._error("readers or mpi_io, not both", "both", remedy)
        if self.mpi_io == "collective" and terms.may_shrink:
            remedy = "Use mpi_io='independent', or start without --with-ft ulfm."
            raise self._error(
                "no collective reads where the job continues without ranks that die", "both", remedy
            )

    def servers(self) -> list[int]:
        """Returns for each rank the rank that reads for it: the first of its group."""
        size = self.terms.size
        if self.readers is None or self.readers == size:
            return list(range(size))
        if not runtime.communicator().thread_multiple:
            runtime.notify(
                "keras_dist reads on every rank: readers needs an MPI that allows calls from "
                "several threads at once (MPI_THREAD_MULTIPLE)."
            )
            return list(range(size))
        groups = [rank * self.readers // size for rank in range(size)]
        return [groups.index(group) for group in groups]

    def _one_of(self, name: str, choices: Sequence[object]) -> None:
        value = getattr(self, name)
        if value not in choices:
            expected = f"{name} to be one of {', '.join(map(repr, choices))}"
            raise self._error(expected, repr(value), "See hdf5().")

    def _error(self, expected: str, received: str, remedy: str) -> errors.ArgumentError:
        return errors.ArgumentError(self.terms.explain(expected, received, remedy))


class RowSource:
    """Data sets in files, of which each rank reads its rows.

    Args:
        inspect: finds data sets in a file, from its path and their names.
        files: paths of the files.
        data: names in the structure of a batch.
        method: how they are read.

    Raises:
        ArgumentTypeError: a name or a path is of the wrong type.
        DataError: a file cannot be read.
    """

    def __init__(self, inspect: Inspect, files: Sequence[Any], data: Any, method: ReadMethod):
        terms = method.terms
        named = list(leaves(data, "data"))
        for what, name in [*named, *((f"file {n}", file) for n, file in enumerate(files))]:
            if not isinstance(name, str | os.PathLike):
                raise terms.wrong_kind(f"{what} to be a name", name)
        if not named or not files:
            raise errors.DataError(terms.explain("files and names of data sets", "none", SAME))
        names = [os.fspath(name) for _, name in named]
        self._paths = [os.fspath(file) for file in files]
        self._data, self._method, self._terms = data, method, terms
        self._servers = method.servers()
        bases = [PurePath(path).name for path in self._paths]
        self.facts = [
            Fact("the number of files", len(files), SAME),
            Fact("the digest of the file names, in order,", _digest(bases), SAME),
            Fact("the names of the data sets", [PurePath(n).name for n in names], SAME),
            Fact("block", method.block),
            Fact("mpi_io", method.mpi_io),
            Fact("readers", method.readers),
            Fact("unreadable", method.unreadable),
            *terms.facts(),
        ]
        self.held: Any = None
        if self._servers[terms.rank] == terms.rank:
            self.held = [self._inspect(inspect, path, names) for path in self._paths]

    def _inspect(self, inspect: Inspect, path: str, names: Sequence[str]) -> list[Segment] | str:
        try:
            return inspect(path, names)
        except errors.DataError as failure:
            if self._method.unreadable == "raise":
                raise
            return str(failure)

    def part(self, held: Sequence[Any]) -> Any:
        """Returns the batches of this rank from the layouts that all reading ranks have found."""
        terms, method = self._terms, self._method
        columns = self._columns(held)
        total = columns[0].shape[0]
        terms.need_samples(total)
        batch_size = terms.batch_size or 1
        plan = plan_samples(total, terms.size, terms.rank, batch_size, terms.remainder)
        terms.need_steps(plan.steps)
        plan = plan.limited(terms.steps or plan.steps)
        # Whole chunks of the column with the largest rows, which cost most to read twice.
        widest = max(columns, key=lambda column: column.segments[0].row_nbytes)
        align = min(max(segment.align for segment in widest.segments), total)
        nbytes = sum(column.segments[0].row_nbytes for column in columns)
        is_global = terms.shuffle == "global"
        taken = batch_size * terms.size if is_global else batch_size  # rows of a window in a step
        rows = method.block or block_length(total, nbytes, taken, align, BLOCK_NBYTES)
        block = -(-rows // align) * align
        if block * nbytes > MAX_NBYTES and (method.mpi_io or method.readers):
            raise self._error(
                f"blocks of at most {MAX_NBYTES // nbytes} rows", f"{block}", "Pass block."
            )
        seed = terms.seed if terms.shuffle else None
        each = iter(columns)
        facts = [*self.facts, Fact("lengths", [column.shape for column in columns])]
        among = functools.partial(plan_among, total, terms, batch_size, plan.steps)
        batches = BlockBatches(
            mapped(lambda _: next(each), self._data),
            self._reader(columns),
            Cut(total, block, align, seed, is_global),
            plan,
            kind_of(terms.lasting(facts)),
            among if terms.may_shrink else None,
        )
        self.epochs = batches.epochs
        return for_keras(batches, ahead=method.mpi_io != "collective")

    def _columns(self, held: Sequence[Any]) -> list[Column]:
        """Compares the layouts of all ranks; returns the columns as this rank reads them."""
        layouts = {rank: layout for rank, layout in enumerate(held) if layout is not None}
        bad = {
            number: found
            for layout in layouts.values()
            for number, found in enumerate(layout)
            if isinstance(found, str)
        }
        good = [number for number in range(len(self._paths)) if number not in bad]
        if bad:
            reasons = "; ".join(bad.values())
            if not good:
                raise self._error("a file that can be read", reasons, "Check these files.")
            runtime.notify(f"keras_dist skips {len(bad)} of {len(self._paths)} files: {reasons}")
        first = next(iter(layouts.values()))
        for rank, layout in layouts.items():
            for number in good:
                _compare(first[number], layout[number], rank, self._terms.size)
        mine = layouts.get(self._terms.rank, first)
        for number in good:
            for one, other in zip(first[good[0]], first[number], strict=True):
                if (one.dtype, one.shape) != (other.dtype, other.shape):
                    raise self._error(
                        f"rows of {other.name!r} in {other.path} to be as in {one.path}",
                        f"{_describe(other)} instead of {_describe(one)}",
                        "Convert the files to one dtype and shape.",
                    )
        columns = [Column(segments) for segments in zip(*(mine[n] for n in good), strict=True)]
        if len({column.shape[0] for column in columns}) > 1:
            lengths = ", ".join(f"{c.segments[0].path} {c.shape[0]}" for c in columns)
            raise self._error("files of equal length", lengths, "Cut them to the same length.")
        return columns

    def _reader(self, columns: Sequence[Column]) -> Reader:
        """Returns the reader of the rows. Collective: every rank; may block."""
        method = self._method
        if self._servers != list(range(self._terms.size)):
            return RemoteReader(columns, self._servers)
        if method.mpi_io is None:
            return FileReader(columns)
        for column in columns:
            for segment in column.segments:
                if segment.offset is None:
                    expected = f"a contiguous layout of {segment.name!r} in {segment.path}"
                    remedy = "Leave out mpi_io, or write it without chunks and compression."
                    raise self._error(expected, "chunks, a virtual data set or no data", remedy)
        if method.mpi_io == "collective" and len(columns[0].segments) > 1:
            received = f"{len(columns[0].segments)}"
            remedy = "Use mpi_io='independent' for several files."
            raise self._error("one file for collective reads", received, remedy)
        if runtime.communicator().mpi is None:
            return FileReader(columns)
        collective = method.mpi_io == "collective"
        return CollectiveReader(columns) if collective else FileReader(columns, through_mpi)

    def _error(self, expected: str, received: str, remedy: str) -> errors.DataError:
        return errors.DataError(self._terms.explain(expected, received, remedy))


def _compare(
    expected: Sequence[Segment], received: Sequence[Segment], rank: int, size: int
) -> None:
    """Checks that a rank has found the same data set as the first one.

    Raises:
        MismatchError: it has not; the text is the same on all ranks.
    """
    for one, other in zip(expected, received, strict=True):
        if (one.length, one.dtype, one.shape) != (other.length, other.dtype, other.shape):
            raise errors.MismatchError(
                errors.explain(
                    f"[rank {rank} of {size}]",
                    f"{one.name or 'rows'!r} in {other.path} to have {one.length} rows of "
                    f"{_describe(one)}, as on the first rank that reads",
                    f"{other.length} rows of {_describe(other)}",
                    SAME_FILES,
                )
            )


def _describe(segment: Segment) -> str:
    return f"{np.dtype(segment.dtype)} {segment.shape}"


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
