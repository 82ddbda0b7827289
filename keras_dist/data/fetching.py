"""Atomic copies of files, directories and downloads into a cache. Independent of ranks.

An entry is a directory for one version of its source, in a directory that only its user can access.
It records the sizes and times of its files, which are compared at every use. A process that uses an
entry holds a lock on it as long as it lives, and so do its forks; a later request for the source
removes entries of older versions without a lock.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tarfile
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from keras_dist.storage.ownership import describe, find_unsafe, is_private_directory, private_name

CHUNK_NBYTES = 1 << 20
POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # without data from a server
NOTE = "note.json"
USE = "use"  # the file of an entry that is locked while the entry is in use

_held: dict[str, int] = {}  # descriptors with a lock, by entry; open until the process ends
_log = logging.getLogger("keras_dist")


class NotOwnError(PermissionError):
    """A path in the cache belongs to another user, or others may replace it."""

    def __init__(self, expected: str, path: Path, remedy: str):
        self.expected, self.received, self.remedy = expected, describe(path), remedy
        super().__init__(f"{expected}: {self.received}")


def is_url(source: str) -> bool:
    """Returns whether a source is a download."""
    return urlsplit(source).scheme in ("http", "https")


@dataclasses.dataclass
class Fetch:
    """An entry of a cache."""

    source: str
    cache_dir: Path
    sha256: str | None
    unpack: bool

    def __post_init__(self) -> None:
        self.done_nbytes = self.total_nbytes = 0
        self.fetched = False  # whether it was copied by `run`
        self.stop = threading.Event()
        self._key = _digest([self.source, self.sha256, self.unpack])
        self._own_dir = self.cache_dir / private_name()
        self._entry = self._own_dir / self._key

    @property
    def name(self) -> str:
        """Name of the file or directory."""
        parts = urlsplit(self.source).path if is_url(self.source) else self.source
        return PurePosixPath(parts).name or "data"

    @property
    def path(self) -> Path:
        """Path of the copy, once it exists."""
        return self._entry / self.name

    def run(self) -> None:
        """Copies the source, unless a valid copy exists; waits for other processes that do.

        Raises:
            NotOwnError: the copy belongs to another user, or others may replace it.
            Exception: copying failed; nothing is left of it.
        """
        self._own_dir = _own_directory(self.cache_dir)
        with self._lock():
            name = self._key
            if not is_url(self.source):  # a file that has changed gets another entry
                status = os.stat(self.source)
                name += f"-{_digest([status.st_size, status.st_mtime_ns])}"
            self._entry = self._own_dir / name
            self._remove_unused()
            if not self._is_valid():
                made = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=self._own_dir))
                try:
                    self._fill(made)
                    self._publish(made)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
                self.fetched = True
            hold(self.path)

    def _remove_unused(self) -> None:
        """Removes files of killed processes, and older versions without a lock."""
        for left in self._own_dir.glob(f".{self._key}*"):
            shutil.rmtree(left, ignore_errors=True)
        for entry in self._own_dir.glob(f"{self._key}-*"):
            if entry != self._entry and not _is_held(entry):
                shutil.rmtree(entry, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Excludes other processes of the node, also of other jobs, from this entry."""
        import filelock

        lock = filelock.FileLock(self._own_dir / f"{self._key}.lock")
        while True:
            self._check_stop()
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=POLL_SECONDS)
                break
        try:
            yield
        finally:
            lock.release()

    def _is_valid(self) -> bool:
        """Returns whether the entry exists and has its files as they were copied."""
        if not os.path.lexists(self._entry):
            return False
        self._check_owner()
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            # Earlier versions noted digests, as "contents": such a copy is made again.
            if json.loads((self._entry / NOTE).read_text())["files"] == _contents(self.path):
                return True
            _log.warning("%s has changed since it was copied: it is copied again.", self.path)
        return False

    def _check_owner(self) -> None:
        own, me = (self._entry, self._entry / NOTE, self.path), os.getuid()
        other = next((path for path in own if path.is_symlink()), None)
        others = (path for path in _walk(self._entry) if path.lstat().st_uid != me)
        if (other := other or next(others, None)) is not None:
            expected = f"{other}, in the cache, to belong to this user and not to be a link"
            remedy = f"Find out who has made it, and remove {self._entry}."
            raise NotOwnError(expected, other, remedy)

    def _fill(self, folder: Path) -> None:
        target = folder / self.name
        if not is_url(self.source) and Path(self.source).is_dir():
            files = [path for path in Path(self.source).rglob("*") if path.is_file()]
            self.total_nbytes = sum(path.stat().st_size for path in files)
            shutil.copytree(self.source, target, copy_function=self._copy_one)
            self._check_length()
        elif self.unpack:
            archive = folder / f"{target.name}.archive"
            self._copy(archive)
            _unpack(archive, target)
            archive.unlink()
        else:
            self._copy(target)
        (folder / NOTE).write_text(json.dumps({"files": _contents(target)}))

    def _copy(self, target: Path) -> None:
        """Copies the source to a file, and checks it."""
        digest = hashlib.sha256()
        with self._opened() as file, open(target, "xb") as copy:
            self._copy_bytes(file, copy, digest if self.sha256 else None)
        self._check_length()
        if self.sha256 not in (None, digest.hexdigest()):
            raise OSError(f"its SHA-256 is {digest.hexdigest()} and not {self.sha256}")

    def _check_length(self) -> None:
        if self.total_nbytes and self.done_nbytes != self.total_nbytes:
            raise OSError(f"it ended after {self.done_nbytes} of {self.total_nbytes} bytes")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        if is_url(self.source):
            with urllib.request.urlopen(self.source, timeout=TIMEOUT_SECONDS) as answer:
                self.total_nbytes = int(answer.headers.get("Content-Length") or 0)
                yield answer
        else:
            self.total_nbytes = os.stat(self.source).st_size
            with open(self.source, "rb") as file:
                yield file

    def _copy_one(self, source: str, target: str) -> None:
        with open(source, "rb") as file, open(target, "xb") as copy:
            self._copy_bytes(file, copy)

    def _copy_bytes(self, file: BinaryIO, copy: BinaryIO, digest: Any = None) -> None:
        while chunk := file.read(CHUNK_NBYTES):
            self._check_stop()
            if digest is not None:
                digest.update(chunk)
            copy.write(chunk)
            self.done_nbytes += len(chunk)
        copy.flush()
        os.fsync(copy.fileno())

    def _publish(self, made: Path) -> None:
        """Renames the complete copy to the entry, in place of a damaged one."""
        os.sync()  # of the files of an archive as well
        with contextlib.suppress(FileNotFoundError):
            os.link(self._entry / USE, made / USE)  # locks of the old entry hold for the new one
        if self._entry.exists():
            os.replace(self._entry, made.with_suffix(".before"))
        os.replace(made, self._entry)
        shutil.rmtree(made.with_suffix(".before"), ignore_errors=True)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise InterruptedError("another rank has failed")


def _digest(facts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=10).hexdigest()


def hold(path: Path) -> None:
    """Protects an entry from removal until this process ends."""
    entry = str(path.parent)
    if entry not in _held:
        _held[entry] = os.open(path.parent / USE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(_held[entry], fcntl.LOCK_SH)


def _is_held(entry: Path) -> bool:
    """Tells whether a process holds a lock on an entry."""
    try:
        with open(entry / USE) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _own_directory(cache_dir: Path) -> Path:
    """Returns the directory of this user's entries, which no other user can write or replace."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    real = Path(os.path.realpath(cache_dir))  # a link may be replaced while it is used
    if (unsafe := find_unsafe(real)) is not None:
        expected = f"{unsafe} to belong to this user or root, and others not to write to it"
        remedy = "Pass a cache_dir whose contents other users cannot replace."
        raise NotOwnError(expected, unsafe, remedy)
    own = real / private_name()
    own.mkdir(mode=0o700, exist_ok=True)
    if not is_private_directory(own):
        expected = f"{own} to be a directory of this user alone"
        raise NotOwnError(expected, own, "Remove it, or pass another cache_dir.")
    return own


def _walk(root: Path) -> Iterator[Path]:
    """Yields a path and all paths below it, without following links."""
    yield root
    if not stat.S_ISDIR(root.lstat().st_mode):
        return
    for folder, directories, files in os.walk(root, onerror=_raise):
        yield from (Path(folder, name) for name in (*directories, *files))


def _contents(root: Path) -> dict[str, str]:
    """Returns what each path below a root is: for a file its size and time."""
    found: dict[str, str] = {}
    for path in _walk(root):
        name, status = path.relative_to(root).as_posix(), path.lstat()
        if stat.S_ISDIR(status.st_mode):
            found[name] = "directory"
        elif stat.S_ISLNK(status.st_mode):
            found[name] = f"link to {os.readlink(path)}"
        elif not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is neither a file nor a directory")
        else:
            found[name] = f"{status.st_size} bytes of {status.st_mtime_ns}"
    return found


def _raise(error: OSError) -> None:
    raise error


def _unpack(archive: Path, target: Path) -> None:
    """Unpacks a tar or zip file into a new directory, without writing outside of it."""
    target.mkdir()
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise OSError(f"it has {name!r}, a path outside of it")
            opened.extractall(target)
    else:
        with tarfile.open(archive) as opened:
            if hasattr(tarfile, "data_filter"):
                opened.extractall(target, filter="data")
            else:  # Python before 3.11.4
                opened.extractall(target, _files_in(opened))


def _files_in(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the members of an archive, which must be files or directories within it."""
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise OSError(f"it has {member.name!r}, a link or a path outside of it")
        member.uid, member.gid = os.getuid(), os.getgid()
        member.uname = member.gname = ""  # root would give the files to users of these names
        member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
        yield member
