"""Files of each format that `keras_dist.data` reads, whose samples are the numbers 0, 1, ..."""

import functools
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf
from PIL import Image

__all__ = ["ROW_GROUP", "WRITERS", "decode", "file_by_file", "files", "split", "virtual"]

ROW_GROUP = 5
FOLDER = tempfile.TemporaryDirectory(prefix="keras_dist-sources-")


def write_npz(path: str, numbers: np.ndarray) -> None:
    np.savez(path, x=np.stack([numbers, numbers], 1).astype(">f4"), y=numbers)


def write_parquet(path: str, numbers: np.ndarray) -> None:
    lists = pa.FixedSizeListArray.from_arrays(np.repeat(numbers, 2).astype("float32"), 2)
    text = list(map(str, numbers))
    table = pa.table({"x": lists, "a": numbers, "y": numbers, "text": text})
    pa.parquet.write_table(table, path, row_group_size=ROW_GROUP)


def write_tar(path: str, numbers: np.ndarray) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            for extension in ("x.bin", "cls"):
                # A path outside of the directory is only a name.
                info = tarfile.TarInfo(f"../../{number:03}.{extension}")
                info.size = len(text := str(number).encode())
                archive.addfile(info, io.BytesIO(text))


def write_tfrecord(path: str, numbers: np.ndarray) -> None:
    with tf.io.TFRecordWriter(path) as file:
        for number in numbers:
            file.write(str(number).encode())


def write_text(path: str, numbers: np.ndarray) -> None:
    Path(path).write_text("".join(f"{number}\n" for number in numbers))


def write_hdf5(path: str, numbers: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.stack([numbers, numbers], 1).astype(">f4")
        file["group/y"] = numbers
        chunks = {"chunks": (4,), "compression": "gzip"} if len(numbers) >= 4 else {}
        file.create_dataset("chunks", data=numbers, **chunks)


def write_npy(path: str, numbers: np.ndarray) -> None:
    np.save(path, np.stack([numbers, numbers], 1).astype(">i4"))


def write_image(path: str, numbers: np.ndarray) -> None:
    """Writes an image for each number, whose grey it is, in directories of classes."""
    for number in numbers:
        folder = Path(path, f"class {number % 3}")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (3, 2), int(number)).save(folder / f"{number:03}.png")


WRITERS = {
    "npz": write_npz,
    "parquet": write_parquet,
    "tar": write_tar,
    "tfrecord": write_tfrecord,
    "text": write_text,
    "h5": write_hdf5,
    "npy": write_npy,
    "image": write_image,
}


@functools.cache
def files(kind: str, lengths: tuple[int, ...]) -> list[str]:
    """Returns files with so many samples each, numbered across files."""
    folder = Path(FOLDER.name, kind, "-".join(map(str, lengths)))
    folder.mkdir(parents=True)
    # A tar file without samples is an error.
    pieces = file_by_file(lengths) if kind == "tar" else split(lengths)
    paths = [str(folder / f"{index}.{kind}") for index in range(len(pieces))]
    for path, numbers in zip(paths, pieces, strict=True):
        WRITERS[kind](path, numbers)
    return paths


def split(lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Returns the numbers of each file."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


@functools.cache
def virtual(lengths: tuple[int, ...]) -> str:
    """Returns an HDF5 file whose data sets lie in others."""
    path, total = files("h5", lengths)[0] + ".virtual", sum(lengths)
    layout = h5py.VirtualLayout((total,), "i8")
    for source, numbers in zip(files("h5", lengths), split(lengths), strict=True):
        if len(numbers):
            rows = slice(numbers[0], numbers[-1] + 1)
            layout[rows] = h5py.VirtualSource(source, "group/y", (len(numbers),))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
        file["y"] = np.arange(total)
    return path


def file_by_file(lengths: tuple[int, ...]) -> list[np.ndarray]:
    return [numbers for numbers in split(lengths) if len(numbers)]


def decode(sample: dict[str, bytes]) -> Any:
    number = np.int64(sample["cls"].decode())
    assert sample["x.bin"] == sample["cls"]
    assert sample["__key__"].decode() == f"../../{number:03}"
    return np.float32([number, number]), number
