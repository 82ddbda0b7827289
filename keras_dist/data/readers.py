"""Readers of rows: from files, through MPI's files, or from another rank.

A reader takes ranges of row numbers and returns the rows of each column. All readers return the
same rows; they differ in speed and in the ranks that need access to the files.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.data.blocks import Pieces
from keras_dist.data.segments import Column, Segment, open_hdf5

__all__ = [
    "CollectiveReader",
    "FileReader",
    "Memory",
    "RawFile",
    "Reader",
    "RemoteReader",
    "through_mpi",
]

OPEN_FILES = 16
KEPT = 3  # the current window, the next one, and the previous one


class Reader(Protocol):
    """A reader of rows."""

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays."""


class RawFile(Protocol):
    """A file that is read by offset."""

    def read_at(self, offset: int, target: np.ndarray) -> None:
        """Reads bytes from an offset of the file into memory."""

    def close(self) -> None:
        """Closes the file."""


class Memory:
    """Memory for rows, reused when no array in it is alive.

    The system fills new memory with zeros, which takes as long as to read into it.

    Args:
        columns: columns of the rows.
    """

    def __init__(self, columns: Sequence[Column]):
        self._free: dict[Column, list[mmap.mmap]] = {column: [] for column in columns}

    def rows(self, column: Column, pieces: Pieces) -> np.ndarray:
        """Returns an uninitialised array for rows of a column."""
        shape = (int((pieces[:, 1] - pieces[:, 0]).sum()), *column.shape[1:])
        nbytes = int(np.prod(shape)) * column.dtype.itemsize
        free = self._free[column]
        memory = free.pop() if free else mmap.mmap(-1, max(1, nbytes))
        if len(memory) < nbytes:
            memory = mmap.mmap(-1, nbytes)
        # Views keep this array alive, as it has no base.
        rows: np.ndarray = np.ndarray(shape, column.dtype, buffer=memory)
        weakref.finalize(rows, _keep, free, memory).atexit = False
        return rows


def _keep(free: list[mmap.mmap], memory: mmap.mmap) -> None:
    if len(free) < KEPT:
        free.append(memory)


class FileReader:
    """Reads rows from the files, in this process or in a fork of it.

    Contiguous rows are read without HDF5, which allows one thread at a time.

    Args:
        columns: the columns.
        open_raw: opens a file with contiguous rows. Defaults to the file system.
    """

    def __init__(self, columns: Sequence[Column], open_raw: Callable[[str], RawFile] | None = None):
        self._columns, self._memory = columns, Memory(columns)
        self._reset(open_raw or _SystemFile)

    def _reset(self, open_raw: Callable[[str], RawFile]) -> None:
        self._pid = os.getpid()
        # Reentrant: the garbage collector may close the files during a read.
        self._lock = threading.RLock()
        self._open_raw = open_raw
        self._open: dict[tuple[str, bool], Any] | None = {}

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays.

        Raises:
            DataError: a file cannot be read.
        """
        if os.getpid() != self._pid:
            # The open files are the parent's: HDF5 and MPI cannot be shared.
            self._reset(_SystemFile)
        with self._lock:
            return [self._rows(column, pieces) for column in self._columns]

    def close(self) -> None:
        """Closes the files permanently."""
        with self._lock:
            for file in (self._open or {}).values():
                file.close()
            self._open = None

    def _rows(self, column: Column, pieces: Pieces) -> np.ndarray:
        rows = self._memory.rows(column, pieces)
        done = 0
        for begin, end in pieces.tolist():
            for segment, first, last in column.parts(begin, end):
                self._fill(rows[done : done + last - first], segment, first)
                done += last - first
        return rows

    def _fill(self, rows: np.ndarray, segment: Segment, first: int) -> None:
        offset = segment.offset
        file = self._file(segment.path, offset is not None)
        try:
            if offset is not None:
                file.read_at(offset + first * segment.row_nbytes, _bytes_of(rows))
                _swap(rows, segment)
            else:
                file[segment.name].read_direct(rows, np.s_[first : first + len(rows)])
        except OSError as failure:
            raise errors.DataError(
                errors.explain(
                    runtime.where(),
                    f"{segment.name or 'rows'} in {segment.path} to be readable",
                    " ".join(str(failure).split()),
                    "The file is damaged, or was changed after the data set was made.",
                )
            ) from failure

    def _file(self, path: str, raw: bool) -> Any:
        if self._open is None:
            raise errors.DataError(f"{path} is closed, as the script ends.")
        if (path, raw) not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[path, raw] = self._open_raw(path) if raw else open_hdf5(path)
        return self._open[path, raw]


class _SystemFile:
    """A file read through the file system."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._file)

    def read_at(self, offset: int, target: np.ndarray) -> None:
        done = 0
        while done < target.size:
            count = os.preadv(self._file, [target[done:].data], offset + done)
            if count == 0:
                raise OSError("the file ends before its rows")
            done += count


def through_mpi(path: str) -> RawFile:
    """Opens a file through MPI, for this rank alone."""
    return _engine.File(runtime.communicator(), path, together=False)


class CollectiveReader:
    """Reads rows through MPI, on all ranks together.

    Making it and its methods are collective: MPI closes a file on all ranks at once. Files that are
    open at the end of the job are closed then.

    Args:
        columns: the columns; each is one segment with an offset.
    """

    def __init__(self, columns: Sequence[Column]):
        self._columns, self._memory = columns, Memory(columns)
        self._files: dict[str, _engine.File] = {}
        self._open()  # errors are raised before training

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays. Collective: every rank; blocks."""
        if not self._files:
            self._open()
        return [self._rows(column, pieces) for column in self._columns]

    def release(self) -> None:
        """Closes the files until they are read again. Collective: every rank; blocks."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self) -> None:
        for path in dict.fromkeys(column.segments[0].path for column in self._columns):
            self._files[path] = _engine.File(runtime.communicator(), path, together=True)

    def _rows(self, column: Column, pieces: Pieces) -> np.ndarray:
        (segment,) = column.segments
        rows = self._memory.rows(column, pieces)
        ranges = (segment.offset or 0) + pieces * segment.row_nbytes
        self._files[segment.path].read_together(ranges, _bytes_of(rows))
        _swap(rows, segment)
        return rows


class RemoteReader:
    """Gets rows from another rank, which reads them. Collective to make: every rank.

    If the reading rank dies, this rank reads for itself, if it can. A fork reads for itself.

    Args:
        columns: the columns.
        servers: for each rank the rank that reads for it, possibly itself.
    """

    def __init__(self, columns: Sequence[Column], servers: Sequence[int]):
        self._columns, self._memory, self._pid = columns, Memory(columns), os.getpid()
        self._own = FileReader(columns)
        # Separate readers: otherwise serving and reading would wait for each other.
        serving = FileReader(columns)
        comm = runtime.communicator()
        self._is_client = servers[comm.rank] != comm.rank
        self._service = _engine.RpcService(
            comm, servers, lambda request: serving.read(request.reshape(-1, 2)), serving.close
        )

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays.

        Raises:
            DataError: a file cannot be read, on this rank or on the reading one.
        """
        if not self._is_client or os.getpid() != self._pid or not len(pieces):
            return self._own.read(pieces)
        rows = [self._memory.rows(column, pieces) for column in self._columns]
        try:
            self._service.call(pieces.reshape(-1), [_bytes_of(array) for array in rows])
        except errors.RankLostError:
            self._is_client = False
            return self._own.read(pieces)
        return rows

    def close(self) -> None:
        """Closes the files permanently, and leaves the reading rank."""
        self._own.close()
        if os.getpid() == self._pid:
            self._service.leave()


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    """Returns the memory of rows as bytes."""
    return rows.reshape(-1).view(np.uint8)


def _swap(rows: np.ndarray, segment: Segment) -> None:
    if not np.dtype(segment.dtype).isnative:
        rows.byteswap(inplace=True)
