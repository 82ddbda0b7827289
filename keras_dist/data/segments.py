"""The location and layout of rows in HDF5 and `.npy` files, read from file headers."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist import errors, runtime

LOCKING = (
    "Some file systems, such as Lustre and NFS, may not support locks, and a file that is being "
    "written is locked. If no process writes to it, set HDF5_USE_FILE_LOCKING=FALSE on all ranks."
)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The rows of one data set in one file.

    Args:
        shape: shape of a row.
    """

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
    """The concatenated rows of one data set in all files.

    Args:
        segments: at least one segment; all have the same dtype and row shape.
    """

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self.dtype = np.dtype(segments[0].dtype).newbyteorder("=")
        self.ends = np.cumsum([segment.length for segment in segments])
        self.shape = (int(self.ends[-1]), *segments[0].shape)

    def split(self, begin: int, end: int) -> Iterator[tuple[Segment, int, int]]:
        """Yields the segments of a range of rows, each with its first row and its end."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        for segment, stop in zip(self.segments[first:], self.ends[first:], strict=True):
            start = int(stop) - segment.length
            if start >= end:
                return
            yield segment, max(begin, start) - start, min(end, int(stop)) - start


def segments_of_hdf5(path: str, names: Sequence[str]) -> list[Segment]:
    """Returns the segments of data sets in an HDF5 file."""
    with open_hdf5(path) as file:
        found = [_look_up(file, path, name) for name in names]
    lengths = {segment.name: segment.length for segment in found}
    if len(set(lengths.values())) > 1:
        raise _error(
            f"data sets of equal length in {path}",
            ", ".join(f"{name!r} {length}" for name, length in lengths.items()),
            "Cut them to the same first dimension.",
        )
    return found


def segment_of_npy(path: str) -> Segment:
    """Returns the segment of a `.npy` file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as failure:
        raise _unreadable(path, failure, "Write the file again with numpy.save.") from failure
    if not isinstance(array, np.memmap):
        raise _error(
            f"{path} to be one array", type(array).__name__, "Save each array in a file of its own."
        )
    _check_rows(path, array.dtype, array.shape)
    if not array.flags.c_contiguous:
        raise _error(
            f"{path} to be in C order",
            "an array in Fortran order",
            "Save numpy.ascontiguousarray(array).",
        )
    return Segment(
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


def _look_up(file: Any, path: str, name: str) -> Segment:
    import h5py

    dataset = file.get(name) if isinstance(name, str) else None
    if not isinstance(dataset, h5py.Dataset):
        known: list[str] = []
        file.visititems(
            lambda key, item: known.append(key) if isinstance(item, h5py.Dataset) else None
        )
        raise _error(
            f"a data set {name!r} in {path}",
            "a file with " + (", ".join(map(repr, sorted(known)[:8])) or "none"),
            "Pass one of these names.",
        )
    _check_rows(f"{name!r} in {path}", dataset.dtype, dataset.shape)
    if dataset.is_virtual:
        _check_sources(dataset, path)
    return Segment(
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
        raise _error(f"{label} to have rows", "a scalar or no data", "Add a first dimension.")
    if dtype.kind not in "biufcS":
        raise _error(
            f"{label} to hold numbers or strings of fixed length",
            f"dtype {dtype}",
            "Convert it, or store each field as a separate data set.",
        )


def _check_sources(dataset: Any, path: str) -> None:
    """Raises if a source file is missing, as HDF5 silently returns fill values for it."""
    for source in dataset.virtual_sources():
        name = os.path.join(os.path.dirname(path), source.file_name)
        if source.file_name != "." and not Path(name).is_file():
            raise _error(
                f"the sources of the virtual data set {dataset.name!r} in {path}",
                f"no file {name}",
                "Restore the file, or create the virtual data set without it.",
            )


def _unreadable(path: str, failure: Exception, remedy: str) -> errors.DataError:
    reason = " ".join(str(failure).split()) or type(failure).__name__
    return _error(f"{path} to be readable", reason, remedy)


def _error(expected: str, received: str, remedy: str) -> errors.DataError:
    return errors.DataError(runtime.where(), expected, received, remedy)
