"""Generations: directories of parts, each with a manifest, on disk or in memory.

```
checkpoints/00000012/0-of-2-<sha256>.safetensors     the part of rank 0
checkpoints/00000012/1-of-2-<sha256>.safetensors
checkpoints/00000012-<digest>.json                   the manifest, written last
```

A part gets its name when it is complete and on the disk, so its name says that it is whole. A
generation without a manifest does not exist. Nothing here communicates but the file system. So a
generation becomes whole, in threads of writers, while training continues, whatever ranks wait for.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from keras_dist import errors, runtime
from keras_dist.resume import tensor_file
from keras_dist.resume.tensor_file import Tensor
from keras_dist.storage.atomic_write import beside, move

#: remedy for a generation that cannot be read
REMEDY = "Restore the file, or remove the checkpoint to start over."

SUFFIX, PART_SUFFIX = ".json", ".safetensors"
MANIFEST = re.compile(r"(\d{8,})-([0-9a-f]{32})(\.json|\.npz)")
PART = re.compile(rf"(\d+)-of-(\d+)-([0-9a-f]{{64}}){re.escape(PART_SUFFIX)}")
NUMBER = re.compile(r"\d{8,}")
# Caches of network file systems may hide a new file from the root for some time.
VISIBLE_SECONDS = 60.0
NAP_SECONDS = (0.01, 0.5)  # between looks, growing
SHARED = "Choose a directory that all ranks share, and that they can write to."

FORMAT = "keras_dist generation 1"
FORMATS = (FORMAT, "keras_dist sharded checkpoint 1")  # the latter of earlier versions

_log = logging.getLogger("keras_dist")


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
    """Writes a copy of a generation from blocks, its manifest first; keeps the one before."""
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


def remove(directory: pathlib.Path) -> None:
    """Removes all generations, and the directory unless it is a link."""
    # The manifests first, the newest one last: what is left of the rest is no saved training.
    for path in reversed(newest_first(directory)):
        path.unlink(missing_ok=True)
    is_link = directory.is_symlink() and directory.is_dir()  # which `rmtree` refuses
    for folder in _folders(directory) if is_link else [directory]:
        shutil.rmtree(folder, ignore_errors=True)


def is_committed(directory: pathlib.Path, number: int) -> bool:
    """Returns whether a generation has a manifest: all its parts are whole."""
    names = (path.name for path in directory.iterdir())  # `glob` would hide an error
    return any(name.startswith(f"{number:08d}-") and name.endswith(SUFFIX) for name in names)


def newest_first(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of all manifests in a directory, and of backups of earlier versions."""
    # `glob` hides errors: training would start over, and its backups replace the others.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [path for path in directory.iterdir() if MANIFEST.fullmatch(path.name)]
        return sorted(found, key=number_of, reverse=True)
    return []


def number_of(path: pathlib.Path) -> int:
    """Returns the number of a generation."""
    return int(path.name.partition("-")[0])


def read(path: pathlib.Path) -> Generation | None:
    """Reads a manifest; returns `None` if it is damaged."""
    if path.suffix == tensor_file.ARCHIVE_SUFFIX:
        digest = path.stem.partition("-")[2]
        if tensor_file.digest(path) != digest:
            return None
        return Generation(path, [path], [digest], tensor_file.read_about(path))
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


def find_damage(generation: Generation, ranks: Iterable[int] | None = None) -> list[str]:
    """Compares parts with their digests: those of some ranks. Defaults to all."""
    damage = []
    for rank in range(len(generation.parts)) if ranks is None else ranks:
        path, expected = generation.parts[rank], generation.digests[rank]
        try:
            found = tensor_file.digest(path)
        except OSError as error:
            damage.append(f"{path}: {error.strerror}")
        else:
            if found != expected:
                damage.append(f"{path}, whose SHA-256 is {found} instead of {expected}")
    return damage


class Writer:
    """Writes one generation in a thread, which starts at once."""

    running: ClassVar["list[Writer]"] = []  # in this process
    newest_part: ClassVar[dict[pathlib.Path, int]] = {}  # its number, by directory

    def __init__(
        self,
        directory: pathlib.Path,
        number: int,
        place: tuple[int, int],
        tensors: Sequence[Tensor],
        about: Mapping[str, Any] | None,
        keep: int,
        previous: int | None = None,
    ):
        self.number = number
        self._directory, self._place, self._tensors = directory, place, tensors
        self._about, self._keep, self._previous = about, keep, previous
        self._owner = threading.current_thread()  # the thread that trains
        self._written, self._ended, self._gives_up = (threading.Event() for _ in range(3))
        self._failure: OSError | None = None  # of the part or the manifest
        self._part_failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="keras_dist checkpoint")
        self._thread.start()
        Writer.running = [each for each in Writer.running if each._thread.is_alive()] + [self]

    @classmethod
    def running_in(cls, directory: pathlib.Path) -> "list[Writer]":
        """Returns the writers of a directory that have not ended."""
        found = [each for each in cls.running if each._directory == directory]
        return [each for each in found if each._thread.is_alive()]

    def wait_for_part(self) -> OSError | None:
        """Waits until the part of this rank is written; returns the failure, if it has failed."""
        self._written.wait()
        return self._part_failure

    def finish(self, are_whole: bool) -> OSError | None:
        """Ends the generation: on the root, waits for the manifest. Returns the failure, if any."""
        self._ended.wait(VISIBLE_SECONDS if are_whole else 0)
        self._gives_up.set()
        self._thread.join()
        return self._failure

    def is_whole(self) -> bool:
        """Returns whether the generation has a manifest, as far as this rank can see."""
        with contextlib.suppress(OSError):
            return is_committed(self._directory, self.number)
        return False

    def _run(self) -> None:
        """Writes; logs a failure that nobody asks for, as `fit` has raised for another reason."""
        self._attempt(self._write_part)
        self._part_failure = self._failure
        self._written.set()
        if self._about is not None and self._failure is None:
            self._attempt(self._commit)
        self._ended.set()
        while self._failure is not None and not self._gives_up.wait(NAP_SECONDS[1]):
            if not self._owner.is_alive():
                text = "%s keras_dist: the last checkpoint in %s has failed: %s"
                _log.warning(text, runtime.where(), self._directory, self._failure)
                return

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # raised in the training thread
            text = f"{type(error).__name__}: {error}"
            self._failure = error if isinstance(error, OSError) else errors.CheckpointError(text)

    def _write_part(self) -> None:
        write_part(self._directory, self.number, *self._place, self._tensors)
        self.newest_part[self._directory] = self.number

    def _commit(self) -> None:
        parts = self._wait_for_all(self._place[1])
        about = self._about or {}
        commit(self._directory, self.number, parts, about, self._keep, self._previous)

    def _wait_for_all(self, size: int) -> list[pathlib.Path]:
        """Returns the parts of all ranks when they are whole."""
        nap, longest = NAP_SECONDS
        ended_at = None  # the thread that trains
        while len(parts := parts_of(self._directory, self.number, size)) < size:
            if ended_at is None and not self._owner.is_alive():
                ended_at = time.monotonic()
            late = ended_at is not None and time.monotonic() - ended_at > VISIBLE_SECONDS
            if self._gives_up.wait(nap) or late:
                expected = f"the parts of {size} ranks in {self._directory}/{self.number:08d}"
                received = f"{len(parts)}, seen by this rank"
                raise errors.CheckpointError(expected, received, SHARED)
            nap = min(2 * nap, longest)
        return parts


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
