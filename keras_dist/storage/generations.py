"""Generations of a checkpoint that many ranks write: a directory of parts, and a manifest.

```
checkpoints/00000012/0-of-2-<sha256>.safetensors     the part of rank 0
checkpoints/00000012/1-of-2-<sha256>.safetensors
checkpoints/00000012-<digest>.json                   the manifest, written last
```

A part gets its name when it is complete and on the disk, so its name says that it is whole. A
generation without a manifest does not exist. Does not communicate: the file system does.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from keras_dist.storage import tensor_file, versioned_backups
from keras_dist.storage.atomic_write import beside, move
from keras_dist.storage.tensor_file import Tensor

#: remedy for a checkpoint that cannot be read
REMEDY = "Restore the file, or remove the checkpoint to start over."

SUFFIX, PART_SUFFIX = ".json", ".safetensors"
PART = re.compile(rf"(\d+)-of-(\d+)-([0-9a-f]{{64}}){re.escape(PART_SUFFIX)}")
NUMBER = re.compile(r"\d{8,}")
FORMAT = "keras_dist sharded checkpoint 1"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation with its manifest."""

    path: pathlib.Path
    parts: Sequence[pathlib.Path]
    digests: Sequence[str]
    about: Mapping[str, Any]


def begin(directory: pathlib.Path) -> int:
    """Makes the directory of a new generation and returns its number."""
    directory.mkdir(parents=True, exist_ok=True)
    taken = [versioned_backups.number_of(path) for path in newest_first(directory)]
    taken += [int(path.name) for path in _folders(directory)]
    number = max(taken, default=0) + 1
    _folder(directory, number).mkdir()
    return number


def write_part(
    directory: pathlib.Path,
    number: int,
    rank: int,
    size: int,
    tensors: Sequence[Tensor],
) -> None:
    """Writes the part of a rank; it appears under its name when it is whole."""
    folder = _folder(directory, number)
    name = f"{rank}-of-{size}"
    with beside(folder / f"{name}{PART_SUFFIX}") as partial:
        about = {"format": FORMAT, "generation": str(number), "rank": str(rank), "size": str(size)}
        found = tensor_file.write(partial, tensors, about)
        move(partial, folder / f"{name}-{found}{PART_SUFFIX}")


def parts_of(directory: pathlib.Path, number: int, size: int) -> list[pathlib.Path]:
    """Returns the whole parts of a generation in rank order, those that exist."""
    found = {}
    for path in _folder(directory, number).iterdir():
        match = PART.fullmatch(path.name)
        if match is not None and int(match[2]) == size:
            found[int(match[1])] = path
    return [found[rank] for rank in sorted(found)]


def commit(
    directory: pathlib.Path,
    number: int,
    parts: Sequence[pathlib.Path],
    about: Mapping[str, Any],
    keep: int,
    previous: int | None = None,
) -> pathlib.Path:
    """Writes the manifest of a generation; then removes older generations."""
    manifest = {
        "format": FORMAT,
        "parts": [{"file": path.name} for path in parts],
        "about": about,
    }

    def save(file: BinaryIO) -> None:
        file.write(json.dumps(manifest).encode())

    known = newest_first(directory)
    intact = next((path for path in known if versioned_backups.number_of(path) == previous), None)
    path = versioned_backups.add(directory, save, intact, SUFFIX, number, keep - 1)
    kept = {versioned_backups.number_of(each) for each in newest_first(directory)}
    for folder in _folders(directory):
        if int(folder.name) not in kept and int(folder.name) < number:
            shutil.rmtree(folder, ignore_errors=True)
    return path


def discard(directory: pathlib.Path, number: int) -> None:
    """Removes a generation that was not committed, as far as possible; no other one."""
    with contextlib.suppress(OSError):
        if not is_committed(directory, number):
            shutil.rmtree(_folder(directory, number), ignore_errors=True)


def is_committed(directory: pathlib.Path, number: int) -> bool:
    """Returns whether a generation has a manifest: all its parts are whole."""
    names = (path.name for path in directory.iterdir())  # `glob` would hide an error
    return any(name.startswith(f"{number:08d}-") and name.endswith(SUFFIX) for name in names)


def newest_first(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of all manifests in a directory."""
    return versioned_backups.newest_first(directory, SUFFIX)


def read(path: pathlib.Path) -> Generation | None:
    """Reads a manifest; returns `None` if it is damaged."""
    if not versioned_backups.is_intact(path):
        return None
    manifest = json.loads(path.read_bytes())
    if manifest["format"] != FORMAT:
        raise ValueError(f"the format is {manifest['format']!r}, not {FORMAT!r}")
    names = [part["file"] for part in manifest["parts"]]
    folder = _folder(path.parent, versioned_backups.number_of(path))
    matches = [PART.fullmatch(name) for name in names]
    digests = ["" if match is None else match[3] for match in matches]
    return Generation(path, [folder / name for name in names], digests, manifest["about"])


def find_damage(generation: Generation, ranks: Iterable[int]) -> list[str]:
    """Compares parts with their digests."""
    damage = []
    for rank in ranks:
        path, expected = generation.parts[rank], generation.digests[rank]
        try:
            found = tensor_file.digest(path)
        except OSError as error:
            damage.append(f"{path}: {error.strerror}")
        else:
            if found != expected:
                damage.append(f"{path}, whose SHA-256 is {found} instead of {expected}")
    return damage


def _folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"{number:08d}"


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.iterdir() if NUMBER.fullmatch(path.name) and path.is_dir()]
