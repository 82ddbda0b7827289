"""Where the rows of data sets lie: in which files, in what layout. Looks, and reads no row."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist import errors, runtime

__all__ = ["Column", "Segment", "open_hdf5", "segment_of_npy", "segments_of_hdf5"]

LOCKING = (
    "Some file systems, Lustre and NFS among them, cannot lock files, and a file that is being "
    "written is locked. Where nobody writes, set HDF5_USE_FILE_LOCKING=FALSE on all ranks."
)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The rows of one data set in one file.

    Args:
        path: the file.
        name: of the data set in an HDF5 file; `None` in a `.npy` file.
        length: number of rows.
        dtype: that of the file, as numpy writes it.
        shape: of a row.
        align: rows of a chunk; 1 where there are none.
        offset: byte at which the first row begins; `None` where the rows are not simply one after
            the other.
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
        """Bytes of a row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class Column:
    """The rows of one data set over all files, one file after the other.

    Args:
        segments: at least one; all of one dtype and shape.
    """

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self.dtype = np.dtype(segments[0].dtype).newbyteorder("=")
        self.ends = np.cumsum([segment.length for segment in segments])
        self.shape = (int(self.ends[-1]), *segments[0].shape)

    def parts(self, begin: int, end: int) -> Iterator[tuple[Segment, int, int]]:
        """Yields the segments in which rows lie, with the rows of each."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        for segment, stop in zip(self.segments[first:], self.ends[first:], strict=True):
            start = int(stop) - segment.length
            if start >= end:
                return
            yield segment, max(begin, start) - start, min(end, int(stop)) - start


def segments_of_hdf5(path: str, names: Sequence[str]) -> list[Segment]:
    """Looks up data sets in an HDF5 file.

    Args:
        path: the file.
        names: of the data sets, as in `"group/images"`.

    Raises:
        DataError: the file cannot be read, or has no such data sets of numbers and equal length.
    """
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
    """Looks into a `.npy` file.

    Raises:
        DataError: it cannot be read, or is no array of numbers in C order.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as failure:
        raise _unreadable(path, failure, "Write it again by numpy.save.") from failure
    if not isinstance(array, np.memmap):
        raise _error(f"{path} to be one array", type(array).__name__, "Save each array by itself.")
    _check_rows(path, array.dtype, array.shape)
    if not array.flags.c_contiguous:
        raise _error(
            f"{path} to be in C order",
            "an array in Fortran order",
            "Save numpy.ascontiguousarray of it.",
        )
    return Segment(
        path, None, len(array), array.dtype.str, array.shape[1:], offset=int(array.offset)
    )


def open_hdf5(path: str) -> Any:
    """Opens an HDF5 file to read, in which other processes may read as well.

    Raises:
        DataError: that is not possible.
    """
    import h5py

    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as failure:
        is_locked = "lock" in str(failure)
        remedy = LOCKING if is_locked else "Look whether it is there, whole and readable here."
        raise _unreadable(path, failure, remedy) from failure


def _look_up(file: Any, path: str, name: str) -> Segment:
    import h5py

    dataset = file.get(name) if isinstance(name, str) else None
    if not isinstance(dataset, h5py.Dataset):
        known: list[str] = []
        file.visititems(
            lambda key, thing: known.append(key) if isinstance(thing, h5py.Dataset) else None
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


def _check_rows(what: str, dtype: np.dtype, shape: tuple[int, ...] | None) -> None:
    if not shape:
        raise _error(f"{what} to have rows", "a scalar or nothing", "Give it a first dimension.")
    if dtype.kind not in "biufcS":
        raise _error(
            f"{what} to be of numbers or of strings of fixed length",
            f"dtype {dtype}",
            "Convert it, or store each field as a data set of its own.",
        )


def _check_sources(dataset: Any, path: str) -> None:
    """Raises when a file is missing in whose place HDF5 would hand out fill values, silently."""
    for source in dataset.virtual_sources():
        name = os.path.join(os.path.dirname(path), source.file_name)
        if source.file_name != "." and not Path(name).is_file():
            raise _error(
                f"the sources of the virtual data set {dataset.name!r} in {path}",
                f"no file {name}",
                "Bring it back, or make the virtual data set without it.",
            )


def _unreadable(path: str, failure: Exception, remedy: str) -> errors.DataError:
    reason = " ".join(str(failure).split()) or type(failure).__name__
    return _error(f"{path} to be readable", reason, remedy)


def _error(expected: str, received: str, remedy: str) -> errors.DataError:
    return errors.DataError(errors.explain(runtime.where(), expected, received, remedy))
