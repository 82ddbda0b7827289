"""Generations: directories of parts, each with a manifest, on disk or in memory.

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
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_dist.resume import earlier, tensor_file
from keras_dist.resume.tensor_file import Entry, Tensor
from keras_dist.storage.atomic_write import beside, move

#: remedy for a generation that cannot be read
REMEDY = "Restore the file, or remove the checkpoint to start over."

SUFFIX, PART_SUFFIX = ".json", ".safetensors"
MANIFEST = re.compile(r"(\d{8,})-([0-9a-f]{32})(\.json|\.npz)")
PART = re.compile(rf"(\d+)-of-(\d+)-([0-9a-f]{{64}}){re.escape(PART_SUFFIX)}")
NUMBER = re.compile(r"\d{8,}")
FORMAT = "keras_dist generation 1"
FORMATS = (FORMAT, "keras_dist sharded checkpoint 1")  # the latter of earlier versions


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation with its manifest."""

    path: pathlib.Path
    parts: Sequence[pathlib.Path]
    digests: Sequence[str]
    about: Mapping[str, Any]


def begin(directory: pathlib.Path, number: int | None = None) -> int:
    """Makes the directory of a new generation and returns its number."""
    directory.mkdir(parents=True, exist_ok=True)
    if number is None:
        taken = [number_of(path) for path in newest_first(directory)]
        number = 1 + max([*taken, *(int(path.name) for path in _folders(directory))], default=0)
    _folder(directory, number).mkdir()
    return number


def write_part(
    directory: pathlib.Path, number: int, rank: int, size: int, tensors: Sequence[Tensor]
) -> pathlib.Path:
    """Writes the part of a rank; it appears under its name when it is whole."""
    name = f"{rank}-of-{size}"
    path = _folder(directory, number) / f"{name}{PART_SUFFIX}"
    with beside(path) as partial:
        about = {"format": FORMAT, "generation": str(number), "rank": str(rank), "size": str(size)}
        found = tensor_file.write(partial, tensors, about)
        whole = path.with_name(f"{name}-{found}{PART_SUFFIX}")
        move(partial, whole)
    return whole


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
    manifest = {"format": FORMAT, "parts": [{"file": path.name} for path in parts], "about": about}
    return _commit(directory, number, json.dumps(manifest).encode(), keep, previous)


def write(
    directory: pathlib.Path,
    tensors: Sequence[Tensor],
    about: Mapping[str, Any],
    previous: int | None = None,
    number: int | None = None,
) -> pathlib.Path:
    """Writes a generation of one part; keeps the one before."""
    number = begin(directory, number)
    try:
        part = write_part(directory, number, 0, 1, tensors)
        return commit(directory, number, [part], about, 2, previous)
    except BaseException:
        discard(directory, number)
        raise


def write_copy(
    directory: pathlib.Path,
    name: str,
    blocks: Iterable[bytes | memoryview],
    previous: int | None = None,
) -> pathlib.Path:
    """Writes a copy of a generation of one part; keeps the one before.

    Args:
        blocks: the bytes of its manifest, in one block, then those of its part.
    """
    number, blocks = number_of(pathlib.Path(name)), iter(blocks)
    with contextlib.suppress(FileExistsError):  # of a copy that did not arrive
        begin(directory, number)
    try:
        manifest = bytes(next(blocks, b""))
        if f"{number:08d}-{_digest(manifest)}{SUFFIX}" != name:
            raise OSError(f"{name} arrived damaged")
        part = _folder(directory, number) / json.loads(manifest)["parts"][0]["file"]
        with beside(part) as partial:
            if f"-{tensor_file.write_blocks(partial, blocks)}." not in part.name:
                raise OSError(f"{part.name} of {name} arrived damaged")
            move(partial, part)
        return _commit(directory, number, manifest, 2, previous)
    except BaseException:
        discard(directory, number)
        raise


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
    """Returns the paths of all manifests in a directory, and of backups of earlier versions."""
    found = [path for path in directory.glob("*-*.*") if MANIFEST.fullmatch(path.name)]
    return sorted(found, key=number_of, reverse=True)


def number_of(path: pathlib.Path) -> int:
    """Returns the number of a generation."""
    return int(path.name.partition("-")[0])


def read(path: pathlib.Path) -> Generation | None:
    """Reads a manifest; returns `None` if it is damaged."""
    if path.suffix == earlier.SUFFIX:
        digest = path.stem.partition("-")[2]
        intact = earlier.digest(path) == digest
        return Generation(path, [path], [digest], earlier.read_about(path)) if intact else None
    content = path.read_bytes()
    if _digest(content) != path.stem.partition("-")[2]:
        return None
    manifest = json.loads(content)
    if manifest["format"] not in FORMATS:
        raise ValueError(f"the format is {manifest['format']!r}, not {FORMAT!r}")
    names = [part["file"] for part in manifest["parts"]]
    folder = _folder(path.parent, number_of(path))
    matches = [PART.fullmatch(name) for name in names]
    digests = ["" if match is None else match[3] for match in matches]
    return Generation(path, [folder / name for name in names], digests, manifest["about"])


def read_header(part: pathlib.Path) -> dict[str, Entry]:
    """Returns the arrays of a part by name."""
    return (earlier if part.suffix == earlier.SUFFIX else tensor_file).read_header(part)


def find_damage(generation: Generation, ranks: Iterable[int] | None = None) -> list[str]:
    """Compares parts with their digests: those of some ranks. Defaults to all."""
    damage = []
    for rank in range(len(generation.parts)) if ranks is None else ranks:
        path, expected = generation.parts[rank], generation.digests[rank]
        file = earlier if path.suffix == earlier.SUFFIX else tensor_file
        try:
            found = file.digest(path)
        except OSError as error:
            damage.append(f"{path}: {error.strerror}")
        else:
            if found != expected:
                damage.append(f"{path}, whose SHA-256 is {found} instead of {expected}")
    return damage


def _commit(
    directory: pathlib.Path, number: int, manifest: bytes, keep: int, previous: int | None
) -> pathlib.Path:
    for partial in directory.glob(f".*{SUFFIX}"):
        partial.unlink(missing_ok=True)  # of a writer that was killed
    known = newest_first(directory)
    older = [number_of(path) for path in known]
    start = older.index(previous) if previous in older else 0
    kept = {number, *older[start : start + keep - 1]}
    path = directory / f"{number:08d}-{_digest(manifest)}{SUFFIX}"
    with beside(directory / f"manifest{SUFFIX}") as partial:
        with partial.open("xb") as file:
            file.write(manifest)
        move(partial, path)
    for old in known:
        if number_of(old) not in kept:
            old.unlink(missing_ok=True)
    for folder in _folders(directory):
        if int(folder.name) not in kept and int(folder.name) < number:
            shutil.rmtree(folder, ignore_errors=True)
    return path


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"{number:08d}"


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.iterdir() if NUMBER.fullmatch(path.name) and path.is_dir()]
