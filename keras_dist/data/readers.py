"""Readers of rows from local files.

All readers return the same rows. They differ in speed, and in which ranks access the files.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.blocks import Pieces
from keras_dist.data.segments import Column, Segment, open_hdf5

OPEN_FILES = 16
BUFFERS = 3  # for the current window, the next window, and the previous window


class Reader(Protocol):
    """Reads ranges of rows."""

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column.

        Args:
            ranges: int64 array of shape `(count, 2)`, begin and end of each range.

        Returns:
            For each column a new array of shape `(rows, ...)`.
        """


class FlatFile(Protocol):
    """A file with access to its bytes."""

    def read_at(self, offset: int, target: np.ndarray) -> None:
        """Fills `target` with the bytes from `offset` on."""

    def close(self) -> None:
        """Closes the file."""


class RowBuffers:
    """Memory for rows, reused once no array refers to it.

    The kernel fills new memory with zeros, which takes as long as the read itself.
    """

    def __init__(self, columns: Sequence[Column]):
        self._free: dict[Column, list[mmap.mmap]] = {column: [] for column in columns}

    def rows(self, column: Column, ranges: Pieces) -> np.ndarray:
        """Returns an uninitialized array for rows of a column."""
        shape = (int((ranges[:, 1] - ranges[:, 0]).sum()), *column.shape[1:])
        nbytes = int(np.prod(shape)) * column.dtype.itemsize
        free = self._free[column]
        memory = free.pop() if free else mmap.mmap(-1, max(1, nbytes))
        if len(memory) < nbytes:
            memory = mmap.mmap(-1, nbytes)
        # The array has no base array, so views keep this array alive.
        rows: np.ndarray = np.ndarray(shape, column.dtype, buffer=memory)
        weakref.finalize(rows, _keep, free, memory).atexit = False
        return rows


def _keep(free: list[mmap.mmap], memory: mmap.mmap) -> None:
    if len(free) < BUFFERS:
        free.append(memory)


class FileReader:
    """Reads rows from files, in this process or in a fork of it.

    Contiguous rows are read without HDF5, which serves one thread at a time.
    """

    def __init__(
        self, columns: Sequence[Column], open_flat: Callable[[str], FlatFile] | None = None
    ):
        self._columns, self._buffers = columns, RowBuffers(columns)
        self._reset(open_flat or _SystemFile)

    def _reset(self, open_flat: Callable[[str], FlatFile]) -> None:
        self._pid = os.getpid()
        # Reentrant: the garbage collector may call close() in the thread that reads.
        self._lock = threading.RLock()
        self._open_flat = open_flat
        self._files: dict[tuple[str, bool], Any] | None = {}

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, see `Reader`."""
        if os.getpid() != self._pid:
            # The open files belong to the parent: HDF5 and MPI cannot share them with a fork.
            self._reset(_SystemFile)
        with self._lock:
            return [self._rows(column, ranges) for column in self._columns]

    def close(self) -> None:
        """Closes the files permanently."""
        with self._lock:
            for file in (self._files or {}).values():
                file.close()
            self._files = None

    def _rows(self, column: Column, ranges: Pieces) -> np.ndarray:
        rows = self._buffers.rows(column, ranges)
        done = 0
        for begin, end in ranges.tolist():
            for segment, first, last in column.split(begin, end):
                self._fill(rows[done : done + last - first], segment, first)
                done += last - first
        return rows

    def _fill(self, rows: np.ndarray, segment: Segment, first: int) -> None:
        offset = segment.offset
        file = self._file(segment.path, offset is not None)
        try:
            if offset is not None:
                file.read_at(offset + first * segment.row_nbytes, bytes_of(rows))
                to_native(rows, segment)
            else:
                file[segment.name].read_direct(rows, np.s_[first : first + len(rows)])
        except OSError as failure:
            raise errors.DataError(
                runtime.where(),
                f"{segment.name or 'rows'} in {segment.path} to be readable",
                " ".join(str(failure).split()),
                "The file is damaged, or has changed since the data set was created.",
            ) from failure

    def _file(self, path: str, flat: bool) -> Any:
        if self._files is None:
            raise errors.DataError(f"{path} is closed, as the script ends.")
        if (path, flat) not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[path, flat] = self._open_flat(path) if flat else open_hdf5(path)
        return self._files[path, flat]


class _SystemFile:
    """A file that the operating system reads."""

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


def bytes_of(rows: np.ndarray) -> np.ndarray:
    """Returns the memory of contiguous rows as uint8."""
    return rows.reshape(-1).view(np.uint8)


def to_native(rows: np.ndarray, segment: Segment) -> None:
    """Converts rows in place from the byte order of the file to the native byte order."""
    if not np.dtype(segment.dtype).isnative:
        rows.byteswap(inplace=True)
