"""Data sets in files, surveyed: what stands in them, whether all ranks mean the same, who reads."""

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
from keras_dist.data.readers import AskingReader, FileReader, Reader, TogetherReader, through_mpi
from keras_dist.data.segments import Column, Segment
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["MpiIo", "ReadMethod", "RowSource", "Unreadable"]

BLOCK_NBYTES = 16 << 20
MOST_NBYTES = 1 << 30  # what MPI reads or sends at once

MpiIo = Literal["independent", "collective"]
Unreadable = Literal["raise", "skip"]
Look = Callable[[str, Sequence[str]], list[Segment]]

SAME = "Pass the same files and names, in the same order, on every rank."
WHOLE = "Bring the same files to all nodes."


@dataclasses.dataclass(frozen=True)
class ReadMethod:
    """How rows are to be read: arguments of `hdf5`, checked.

    Args:
        block: rows that are read at once.
        mpi_io: how MPI reads them, if it does.
        readers: how many ranks read.
        unreadable: what becomes of files that cannot be read.
        terms: those of the data set.

    Raises:
        ArgumentError: an argument has an impossible value, or does not go with another.
        ArgumentTypeError: an argument is of the wrong kind.
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
                raise terms.wrong_kind(f"{name} to be a whole number", value)
            if value < 1 or (most is not None and value > most):
                limits = f"1 to {most}, the number of ranks" if most else "at least 1"
                raise self._error(f"{name} to be {limits}", str(value), "Leave it out.")
        if self.readers is not None and self.mpi_io is not None:
            remedy = "Leave one of them out."
            raise self._error("readers or mpi_io, not both", "both", remedy)
        if self.mpi_io == "collective" and terms.may_shrink:
            remedy = "Take mpi_io='independent', or start without --with-ft ulfm."
            raise self._error("no collective reading where ranks may die", "both", remedy)

    def servers(self) -> list[int]:
        """Returns for each rank which one reads for it: the first of its neighbours."""
        size = self.terms.size
        if self.readers is None or self.readers == size:
            return list(range(size))
        if not runtime.communicator().thread_multiple:
            runtime.notify(
                "keras_dist reads on every rank, as readers needs an MPI that allows calls from "
                "several threads at once (MPI_THREAD_MULTIPLE)."
            )
            return list(range(size))
        groups = [rank * self.readers // size for rank in range(size)]
        return [groups.index(group) for group in groups]

    def _one_of(self, name: str, choices: Sequence[object]) -> None:
        value = getattr(self, name)
        if value not in choices:
            expected = f"{name} to be one of {', '.join(map(repr, choices))}"
            raise self._error(expected, repr(value), "See hdf5() for what each does.")

    def _error(self, expected: str, received: str, remedy: str) -> errors.ArgumentError:
        return errors.ArgumentError(self.terms.explain(expected, received, remedy))


class RowSource:
    """Data sets in files of which each rank reads its rows.

    Args:
        look: finds data sets in a file; takes its path and their names.
        files: the paths.
        data: names in the structure of a batch.
        way: how they are read.

    Raises:
        ArgumentTypeError: a name or a path is none.
        DataError: a file cannot be read.
    """

    def __init__(self, look: Look, files: Sequence[Any], data: Any, way: ReadMethod):
        terms = way.terms
        named = list(leaves(data, "data"))
        for what, name in [*named, *((f"file {n}", file) for n, file in enumerate(files))]:
            if not isinstance(name, str | os.PathLike):
                raise terms.wrong_kind(f"{what} to be a name", name)
        if not named or not files:
            raise errors.DataError(terms.explain("files and names of data sets", "none", SAME))
        names = [os.fspath(name) for _, name in named]
        self._paths = [os.fspath(file) for file in files]
        self._data, self._way, self._terms = data, way, terms
        self._servers = way.servers()
        bases = [PurePath(path).name for path in self._paths]
        self.facts = [
            Fact("the number of files", len(files), SAME),
            Fact("the digest of the file names, in order,", _digest(bases), SAME),
            Fact("the names of the data sets", [PurePath(n).name for n in names], SAME),
            Fact("block", way.block),
            Fact("mpi_io", way.mpi_io),
            Fact("readers", way.readers),
            Fact("unreadable", way.unreadable),
            *terms.facts(),
        ]
        self.held: Any = None
        if self._servers[terms.rank] == terms.rank:
            self.held = [self._survey(look, path, names) for path in self._paths]

    def _survey(self, look: Look, path: str, names: Sequence[str]) -> list[Segment] | str:
        try:
            return look(path, names)
        except errors.DataError as failure:
            if self._way.unreadable == "raise":
                raise
            return str(failure)

    def part(self, held: Sequence[Any]) -> Any:
        """Returns this rank's batches, given what all ranks that read have found."""
        terms, way = self._terms, self._way
        columns = self._columns(held)
        total = columns[0].shape[0]
        terms.need_samples(total)
        batch_size = terms.batch_size or 1
        plan = plan_samples(total, terms.size, terms.rank, batch_size, terms.remainder)
        terms.need_steps(plan.steps)
        plan = plan.limited(terms.steps or plan.steps)
        # Whole chunks of what has the largest rows: there it costs most to read one twice.
        widest = max(columns, key=lambda column: column.segments[0].row_nbytes)
        align = min(max(segment.align for segment in widest.segments), total)
        nbytes = sum(column.segments[0].row_nbytes for column in columns)
        is_global = terms.shuffle == "global"
        taken = batch_size * terms.size if is_global else batch_size  # of a window, in a step
        rows = way.block or block_length(total, nbytes, taken, align, BLOCK_NBYTES)
        block = -(-rows // align) * align
        if block * nbytes > MOST_NBYTES and (way.mpi_io or way.readers):
            raise self._error(f"blocks of at most {MOST_NBYTES // nbytes} rows", f"{block}", "")
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
        return for_keras(batches, ahead=way.mpi_io != "collective")

    def _columns(self, held: Sequence[Any]) -> list[Column]:
        """Returns the columns as this rank reads them, after comparing what ranks have found."""
        surveys = {rank: survey for rank, survey in enumerate(held) if survey is not None}
        bad = {
            number: found
            for survey in surveys.values()
            for number, found in enumerate(survey)
            if isinstance(found, str)
        }
        good = [number for number in range(len(self._paths)) if number not in bad]
        if bad:
            said = "; ".join(bad.values())
            if not good:
                raise self._error("a file that can be read", said, "Look at these files.")
            runtime.notify(f"keras_dist leaves out {len(bad)} of {len(self._paths)} files: {said}")
        first = next(iter(surveys.values()))
        for rank, survey in surveys.items():
            for number in good:
                _compare(first[number], survey[number], rank, self._terms.size)
        mine = surveys.get(self._terms.rank, first)
        for number in good:
            for one, other in zip(first[good[0]], first[number], strict=True):
                if (one.dtype, one.shape) != (other.dtype, other.shape):
                    raise self._error(
                        f"rows of {other.name!r} in {other.path} to be as in {one.path}",
                        f"{_describe(other)} in place of {_describe(one)}",
                        "Convert them alike.",
                    )
        columns = [Column(segments) for segments in zip(*(mine[n] for n in good), strict=True)]
        if len({column.shape[0] for column in columns}) > 1:
            said = ", ".join(f"{c.segments[0].path} {c.shape[0]}" for c in columns)
            raise self._error("files of equal length", said, "Cut them to the same length.")
        return columns

    def _reader(self, columns: Sequence[Column]) -> Reader:
        """Returns the way to the rows. Collective: every rank; may block."""
        way = self._way
        if self._servers != list(range(self._terms.size)):
            return AskingReader(columns, self._servers)
        if way.mpi_io is None:
            return FileReader(columns)
        for column in columns:
            for segment in column.segments:
                if segment.offset is None:
                    expected = f"a contiguous layout of {segment.name!r} in {segment.path}"
                    remedy = "Leave out mpi_io, or write it without chunks and compression."
                    raise self._error(expected, "chunks, a virtual data set or no data", remedy)
        if way.mpi_io == "collective" and len(columns[0].segments) > 1:
            received = f"{len(columns[0].segments)}"
            remedy = "Take mpi_io='independent' for several."
            raise self._error("one file for collective reading", received, remedy)
        if runtime.communicator().mpi is None:
            return FileReader(columns)
        collective = way.mpi_io == "collective"
        return TogetherReader(columns) if collective else FileReader(columns, through_mpi)

    def _error(self, expected: str, received: str, remedy: str) -> errors.DataError:
        return errors.DataError(self._terms.explain(expected, received, remedy))


def _compare(
    expected: Sequence[Segment], received: Sequence[Segment], rank: int, size: int
) -> None:
    """Raises, with one text on all ranks, when a rank has found another data set than the first."""
    for one, other in zip(expected, received, strict=True):
        if (one.length, one.dtype, one.shape) != (other.length, other.dtype, other.shape):
            raise errors.MismatchError(
                errors.explain(
                    f"[rank {rank} of {size}]",
                    f"{one.name or 'rows'!r} in {other.path} to have {one.length} rows of "
                    f"{_describe(one)}, as on the first rank that reads",
                    f"{other.length} rows of {_describe(other)}",
                    WHOLE,
                )
            )


def _describe(segment: Segment) -> str:
    return f"{np.dtype(segment.dtype)} {segment.shape}"


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
