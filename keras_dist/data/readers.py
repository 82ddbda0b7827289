"""Ways to the rows of columns: from the files, through MPI's files, from another rank.

A reader takes pieces of row numbers and returns the rows of each column. All ways give the same
rows; so nothing but speed, and who needs access to the files, depends on the way.
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
    "AskingReader",
    "FileReader",
    "Flat",
    "Memory",
    "Reader",
    "TogetherReader",
    "through_mpi",
]

OPEN_FILES = 16
KEPT = 3  # the window that is handed out, the next one, and the one that is left


class Reader(Protocol):
    """A way to rows."""

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays."""


class Flat(Protocol):
    """A file whose bytes can be had."""

    def read_at(self, offset: int, target: np.ndarray) -> None:
        """Fills memory with what begins at a byte of the file."""

    def close(self) -> None:
        """Closes the file."""


class Memory:
    """Memory for rows, used again once nobody holds an array in it.

    Fresh memory is filled with zeros by the system, which takes as long as to read into it.

    Args:
        columns: those whose rows it is for.
    """

    def __init__(self, columns: Sequence[Column]):
        self._free: dict[Column, list[mmap.mmap]] = {column: [] for column in columns}

    def rows(self, column: Column, pieces: Pieces) -> np.ndarray:
        """Returns an array for rows of a column, with anything in it."""
        shape = (int((pieces[:, 1] - pieces[:, 0]).sum()), *column.shape[1:])
        nbytes = int(np.prod(shape)) * column.dtype.itemsize
        free = self._free[column]
        memory = free.pop() if free else mmap.mmap(-1, max(1, nbytes))
        if len(memory) < nbytes:
            memory = mmap.mmap(-1, nbytes)
        # Views hold on to this array, as there is no other behind it.
        rows: np.ndarray = np.ndarray(shape, column.dtype, buffer=memory)
        weakref.finalize(rows, _keep, free, memory).atexit = False
        return rows


def _keep(free: list[mmap.mmap], memory: mmap.mmap) -> None:
    if len(free) < KEPT:
        free.append(memory)


class FileReader:
    """Rows from the files themselves, in this process or in a fork of it.

    Rows that simply lie one after the other are read without HDF5, which lets one thread in at a
    time.

    Args:
        columns: the data.
        open_flat: opens a file whose rows lie so. Defaults to the system's.
    """

    def __init__(self, columns: Sequence[Column], open_flat: Callable[[str], Flat] | None = None):
        self._columns, self._memory = columns, Memory(columns)
        self._begin(open_flat or _Plain)

    def _begin(self, open_flat: Callable[[str], Flat]) -> None:
        self._pid = os.getpid()
        # Again in the same thread: the garbage collector may close it in the midst of a read.
        self._lock = threading.RLock()
        self._open_flat = open_flat
        self._open: dict[tuple[str, bool], Any] | None = {}

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays.

        Raises:
            DataError: a file cannot be read.
        """
        if os.getpid() != self._pid:
            # What is open is the parent's: neither HDF5 nor MPI is for both.
            self._begin(_Plain)
        with self._lock:
            return [self._rows(column, pieces) for column in self._columns]

    def close(self) -> None:
        """Closes the files for good."""
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
                    "The file is damaged, or has changed since the data set was made.",
                )
            ) from failure

    def _file(self, path: str, flat: bool) -> Any:
        if self._open is None:
            raise errors.DataError(f"{path} has been closed, as the script ends.")
        if (path, flat) not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[path, flat] = self._open_flat(path) if flat else open_hdf5(path)
        return self._open[path, flat]


class _Plain:
    """A file whose bytes the system reads."""

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


def through_mpi(path: str) -> Flat:
    """Opens a file through MPI for this rank alone."""
    return _engine.File(runtime.communicator(), path, together=False)


class TogetherReader:
    """Rows of which all ranks read theirs at the same time, through MPI.

    Collective to make, and so are its methods: only when all ranks come to the same place can MPI
    close a file. What is still open at the end of the job is closed there.

    Args:
        columns: the data; each is one segment with an offset.
    """

    def __init__(self, columns: Sequence[Column]):
        self._columns, self._memory = columns, Memory(columns)
        self._files: dict[str, _engine.File] = {}
        self._open()  # what cannot be read is told before training

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
        places = (segment.offset or 0) + pieces * segment.row_nbytes
        self._files[segment.path].read_together(places, _bytes_of(rows))
        _swap(rows, segment)
        return rows


class AskingReader:
    """Rows that another rank reads and sends. Collective to make: every rank.

    A rank whose reader has died reads for itself from then on, if it can. So does a fork.

    Args:
        columns: the data.
        servers: for each rank, which one reads for it; it may be itself.
    """

    def __init__(self, columns: Sequence[Column], servers: Sequence[int]):
        self._columns, self._memory, self._pid = columns, Memory(columns), os.getpid()
        self._own = FileReader(columns)
        # What it serves with is not what it reads with: one of them waits for the other else.
        serving = FileReader(columns)
        comm = runtime.communicator()
        self._asks = servers[comm.rank] != comm.rank
        self._service = _engine.RpcService(
            comm, servers, lambda question: serving.read(question.reshape(-1, 2)), serving.close
        )

    def read(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, in new arrays.

        Raises:
            DataError: a file cannot be read, here or where it is read.
        """
        if not self._asks or os.getpid() != self._pid or not len(pieces):
            return self._own.read(pieces)
        rows = [self._memory.rows(column, pieces) for column in self._columns]
        try:
            self._service.call(pieces.reshape(-1), [_bytes_of(array) for array in rows])
        except errors.RankLostError:
            self._asks = False
            return self._own.read(pieces)
        return rows

    def close(self) -> None:
        """Closes the files for good; who reads for this rank need not do so any more."""
        self._own.close()
        if os.getpid() == self._pid:
            self._service.leave()


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    """Returns the memory of rows as bytes."""
    return rows.reshape(-1).view(np.uint8)


def _swap(rows: np.ndarray, segment: Segment) -> None:
    if not np.dtype(segment.dtype).isnative:
        rows.byteswap(inplace=True)
