"""Backups of earlier versions: archives of numpy, named by their digest. They are only read."""

import hashlib
import json
import pathlib
import struct
import zipfile
from typing import Any

import numpy as np

from keras_dist.resume.tensor_file import Entry

SUFFIX = ".npz"
ABOUT = "about"  # the name of the JSON document among the arrays
HEADER = struct.Struct("<26x2H")  # of a member: the lengths of its name and of what follows


def digest(path: pathlib.Path) -> str:
    """Returns the digest of a file that its name holds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_about(path: pathlib.Path) -> dict[str, Any]:
    """Returns what a backup says of itself."""
    with np.load(path, allow_pickle=False) as file:
        found: dict[str, Any] = json.loads(str(file[ABOUT]))
    return found


def read_header(path: pathlib.Path) -> dict[str, Entry]:
    """Returns the arrays of a file by name."""
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
            found[name] = Entry(begin + skipped, info.file_size - skipped)
    found.pop(ABOUT)
    return found
