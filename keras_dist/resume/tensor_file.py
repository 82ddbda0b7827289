"""Files of named arrays in the layout of safetensors, written and read piece by piece.

A file is the length of its header (8 bytes, little endian), the header (JSON with dtype, shape and
position of each array), and the bytes of the arrays. Backups of earlier versions are archives of
numpy, named by their digest; they are only read. Reading executes no code.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

CHUNK_NBYTES = 1 << 23
ALIGNMENT = 8  # of the first array
# By the names of dtypes in Keras; arrays of others are stored as bytes.
CODES = dict(
    pair.split("=")
    for pair in "bool=BOOL uint8=U8 int8=I8 uint16=U16 int16=I16 float16=F16 bfloat16=BF16 "
    "uint32=U32 int32=I32 float32=F32 uint64=U64 int64=I64 float64=F64 float8_e4m3fn=F8_E4M3 "
    "float8_e5m2=F8_E5M2".split()
)


# Of backups of earlier versions:
ARCHIVE_SUFFIX = ".npz"
ABOUT = "about"  # the name of the JSON document among the arrays
HEADER = struct.Struct("<26x2H")  # of a member: the lengths of its name and of what follows


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A flat array to be written, and its bytes, contiguous."""

    name: str
    dtype: str
    data: memoryview


@dataclasses.dataclass(frozen=True)
class Extent:
    """An array in a file: its position and size in bytes."""

    path: pathlib.Path
    offset: int
    nbytes: int

    def read(self) -> np.ndarray:
        """Returns the bytes of the array."""
        found = np.empty(self.nbytes, np.uint8)
        read_into(self.path, self.offset, found.data)
        return found


def write(path: pathlib.Path, tensors: Sequence[Tensor], about: dict[str, str]) -> str:
    """Writes a new file and returns its digest."""
    return write_blocks(path, [_header(tensors, about), *(each.data for each in tensors)])


def write_blocks(path: pathlib.Path, blocks: Iterable[bytes | memoryview]) -> str:
    """Writes blocks of bytes as a new file and returns its digest."""
    found = hashlib.sha256()
    try:
        with path.open("xb", buffering=0) as file:
            for block in blocks:
                data = memoryview(block)
                for low in range(0, len(data), CHUNK_NBYTES):
                    chunk = data[low : low + CHUNK_NBYTES]
                    found.update(chunk)
                    while chunk:
                        chunk = chunk[os.write(file.fileno(), chunk) :]
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    return found.hexdigest()


def read_header(path: pathlib.Path) -> dict[str, Extent]:
    """Returns the arrays of a file by name."""
    if path.suffix == ARCHIVE_SUFFIX:
        return _read_archive_header(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    offsets = {name: each["data_offsets"] for name, each in header.items()}
    begin = 8 + length
    return {name: Extent(path, begin + low, high - low) for name, (low, high) in offsets.items()}


def read_into(path: pathlib.Path, offset: int, target: memoryview) -> None:
    """Reads bytes from an offset of a file."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while target:
            count = file.readinto(target)
            if not count:
                raise OSError(f"{path} ends {len(target)} bytes too early")
            target = target[count:]


def digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits, of an archive the digest in its name."""
    with path.open("rb") as file:
        if path.suffix == ARCHIVE_SUFFIX:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_about(path: pathlib.Path) -> dict[str, Any]:
    """Returns what a backup of an earlier version says of itself."""
    with np.load(path, allow_pickle=False) as file:
        found: dict[str, Any] = json.loads(str(file[ABOUT]))
    return found


def _read_archive_header(path: pathlib.Path) -> dict[str, Extent]:
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset)
            begin = info.header_offset + HEADER.size + sum(HEADER.unpack(file.read(HEADER.size)))
            with archive.open(info) as member:
                np.lib.format.read_magic(member)
                np.lib.format.read_array_header_1_0(member)
                skipped = member.tell()
            name = info.filename.removesuffix(".npy")
            found[name] = Extent(path, begin + skipped, info.file_size - skipped)
    found.pop(ABOUT)
    return found


def _header(tensors: Sequence[Tensor], about: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": about}
    offset = 0
    for each in tensors:
        end = offset + len(each.data)
        code = CODES.get(each.dtype, "U8")
        count = len(each.data) if code == "U8" else len(each.data) * 8 // _bits(code)
        entries[each.name] = {"dtype": code, "shape": [count], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bits(code: str) -> int:
    return 8 if code == "BOOL" else int(code.partition("_")[0].lstrip("BFIU"))
