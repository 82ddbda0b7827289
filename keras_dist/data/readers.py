"""Rows in HDF5 and `.npy` files: where they are, from file headers, and readers of them.

Each rank reads for itself, or some ranks send the others theirs. Both return the same rows.
"""

import dataclasses
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime

Pieces = np.ndarray  # int64 of shape (count, 2): first row and end of each piece

OPEN_FILES = 16
BUFFERS = 3  # for the current window, the next window, and the previous window
SCATTERING = "reading rows of files"
LOCKING = (
    "Some file systems, such as Lustre and NFS, may not support locks, and a file that is being "
    "written is locked. If no process writes to it, set HDF5_USE_FILE_LOCKING=FALSE on all ranks."
)


@dataclasses.dataclass(frozen=True)
class RowSegment:
    """The rows of one data set in one file; `shape` is that of a row."""

    path: str
    name: str | None
    length: int
    dtype: str
    shape: tuple[int, ...]
    align: int = 1
    offset: int | None = None

    @property
    def row_nbytes(self) -> int:
        """Size of a row in bytes."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class Column:
    """The rows of one data set in all files: segments, at least one, of one dtype and row shape."""

    def __init__(self, segments: Sequence[RowSegment]):
        self.segments = tuple(segments)
        self.dtype = np.dtype(segments[0].dtype).newbyteorder("=")
        self.ends = np.cumsum([segment.length for segment in segments])
        self.shape = (int(self.ends[-1]), *segments[0].shape)

    def split(self, begin: int, end: int) -> Iterator[tuple[RowSegment, int, int]]:
        """Yields the segments of a range of rows, each with its first row and its end."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        for segment, stop in zip(self.segments[first:], self.ends[first:], strict=True):
            start = int(stop) - segment.length
            if start >= end:
                return
            yield segment, max(begin, start) - start, min(end, int(stop)) - start


def segments_of_hdf5(path: str, names: Sequence[str]) -> list[RowSegment]:
    """Returns the segments of data sets in an HDF5 file."""
    with open_hdf5(path) as file:
        found = [_look_up(file, path, name) for name in names]
    lengths = {segment.name: segment.length for segment in found}
    if len(set(lengths.values())) > 1:
        raise errors.DataError(
            f"data sets of equal length in {path}",
            ", ".join(f"{name!r} {length}" for name, length in lengths.items()),
            "Cut them to the same first dimension.",
        )
    return found


def segment_of_npy(path: str) -> RowSegment:
    """Returns the segment of a `.npy` file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as failure:  # numpy raises errors of several classes, also of a tokenizer
        raise _unreadable(path, failure, "Write the file again with numpy.save.") from failure
    if not isinstance(array, np.memmap):
        raise errors.DataError(
            f"{path} to be one array", type(array).__name__, "Save each array in a file of its own."
        )
    _check_rows(path, array.dtype, array.shape)
    if not array.flags.c_contiguous:
        raise errors.DataError(
            f"{path} to be in C order",
            "an array in Fortran order",
            "Save numpy.ascontiguousarray(array).",
        )
    return RowSegment(
        path, None, len(array), array.dtype.str, array.shape[1:], offset=int(array.offset)
    )


def open_hdf5(path: str) -> Any:
    """Opens an HDF5 file for reading, shared with other readers."""
    import h5py

    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as failure:
        is_locked = "lock" in str(failure)
        remedy = (
            LOCKING if is_locked else "Check that the file is complete and readable on this node."
        )
        raise _unreadable(path, failure, remedy) from failure


def _look_up(file: Any, path: str, name: str) -> RowSegment:
    import h5py

    dataset = file.get(name) if isinstance(name, str) else None
    if not isinstance(dataset, h5py.Dataset):
        known: list[str] = []
        file.visititems(
            lambda key, item: known.append(key) if isinstance(item, h5py.Dataset) else None
        )
        raise errors.DataError(
            f"a data set {name!r} in {path}",
            "a file with " + (", ".join(map(repr, sorted(known)[:8])) or "none"),
            "Pass one of these names.",
        )
    _check_rows(f"{name!r} in {path}", dataset.dtype, dataset.shape)
    if dataset.is_virtual:
        _check_sources(dataset, path)
    return RowSegment(
        path,
        name,
        len(dataset),
        dataset.dtype.str,
        dataset.shape[1:],
        align=dataset.chunks[0] if dataset.chunks else 1,
        offset=None if dataset.chunks or dataset.is_virtual else dataset.id.get_offset(),
    )


def _check_rows(label: str, dtype: np.dtype, shape: tuple[int, ...] | None) -> None:
    if not shape:
        raise errors.DataError(
            f"{label} to have rows", "a scalar or no data", "Add a first dimension."
        )
    if dtype.kind not in "biufcS":
        raise errors.DataError(
            f"{label} to hold numbers or strings of fixed length",
            f"dtype {dtype}",
            "Convert it, or store each field as a separate data set.",
        )


def _check_sources(dataset: Any, path: str) -> None:
    """Raises if a source file is missing, as HDF5 silently returns fill values for it."""
    for source in dataset.virtual_sources():
        name = os.path.join(os.path.dirname(path), source.file_name)
        if source.file_name != "." and not Path(name).is_file():
            raise errors.DataError(
                f"the sources of the virtual data set {dataset.name!r} in {path}",
                f"no file {name}",
                "Restore the file, or create the virtual data set without it.",
            )


def _unreadable(path: str, failure: Exception, remedy: str) -> errors.DataError:
    reason = " ".join(str(failure).split()) or type(failure).__name__
    return errors.DataError(f"{path} to be readable", reason, remedy)


# --- Readers


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
    """Reads rows from files, in this process or in a fork of it."""

    def __init__(self, columns: Sequence[Column], open_flat: Callable[[str], Any] | None = None):
        self._columns, self._buffers = columns, RowBuffers(columns)
        self._reset(open_flat or _SystemFile)

    def _reset(self, open_flat: Callable[[str], Any]) -> None:
        self._pid = os.getpid()
        # Reentrant: the garbage collector may call close() in the thread that reads.
        self._lock = threading.RLock()
        self._open_flat = open_flat
        self._files: dict[tuple[str, bool], Any] | None = {}

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column in ranges, int64 `(count, 2)`: new arrays."""
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

    def _fill(self, rows: np.ndarray, segment: RowSegment, first: int) -> None:
        offset = segment.offset
        file = self._file(segment.path, offset is not None)
        try:
            if offset is not None:  # contiguous: without HDF5, which serves one thread at a time
                target = rows.reshape(-1).view(np.uint8)
                file.read_at(offset + first * segment.row_nbytes, target)
                if not np.dtype(segment.dtype).isnative:  # the byte order of the file
                    rows.byteswap(inplace=True)
            else:
                file[segment.name].read_direct(rows, np.s_[first : first + len(rows)])
        except OSError as failure:
            raise errors.DataError(
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


class ScatteringReader:
    """Reads rows of files on some ranks."""

    def __init__(self, columns: Sequence[Column], readers: Sequence[int]):
        self._files, self._readers = FileReader(columns), readers
        self._comm = runtime.fit_communicator()

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, see `FileReader`. Collective: every rank; blocks."""
        comm, collectives = self._comm, _engine.collectives
        # The name matches calls of threads that data sets read in.
        wanted = collectives.allgather_object(comm, ranges, SCATTERING)
        mine = [self._readers[rank] == comm.rank for rank in range(comm.size)]
        given = [part if reads else part[:0] for part, reads in zip(wanted, mine, strict=True)]
        counts = [int((part[:, 1] - part[:, 0]).sum()) for part in given]
        with collectives.raise_on_all(comm, SCATTERING, SCATTERING):
            columns = self._files.read(np.concatenate(given))
        return [
            collectives.alltoall(comm, rows, counts, SCATTERING, SCATTERING)[0] for rows in columns
        ]

    def close(self) -> None:
        """Closes the files permanently."""
        self._files.close()
