"""A file, directory or download brought into a cache, whole or not at all. Knows no ranks.

An entry is a directory, of one version of its source: one that has changed gets another entry. Who
has been given one holds a lock on a file in it as long as the process lives, and so do its forks;
when the source is asked for again, entries of older versions that nobody holds are removed.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

__all__ = ["Fetch", "hold", "is_url"]

CHUNK_NBYTES = 1 << 20
POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # that a server may stay silent
NOTE, USE = "note.json", "use"

_held: dict[str, int] = {}  # files that are open as long as this process lives, by entry


def is_url(source: str) -> bool:
    """Tells whether this is to be downloaded."""
    return urlsplit(source).scheme in ("http", "https")


@dataclasses.dataclass
class Fetch:
    """An entry of a cache.

    Args:
        source: a path or URL.
        cache_dir: the directory of the cache.
        sha256: the checksum that it has to have, in hexadecimal digits.
        unpack: whether it is an archive whose contents are wanted.
    """

    source: str
    cache_dir: Path
    sha256: str | None
    unpack: bool

    def __post_init__(self) -> None:
        self.done_nbytes = self.total_nbytes = 0
        self.fetched = False  # it had not been there
        self.stop = threading.Event()
        self._key = _digest([self.source, self.sha256, self.unpack])
        self._entry = self.cache_dir / self._key

    @property
    def name(self) -> str:
        """What the file, or directory, is called."""
        parts = urlsplit(self.source).path if is_url(self.source) else self.source
        return PurePosixPath(parts).name or "data"

    @property
    def path(self) -> Path:
        """Where it is to be found, once it has been brought there."""
        return self._entry / self.name

    def run(self) -> None:
        """Brings it there, unless it is there already; waits for others that do.

        Raises:
            Exception: whatever goes wrong; then nothing of it is left.
        """
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        with self._lock():
            stamp = self._stamp()
            if stamp is not None:
                self._entry = self.cache_dir / f"{self._key}-{_digest(stamp)}"
            self._clear()
            if not self._is_there():
                self._bring()
                self.fetched = True
            hold(self.path)

    def _bring(self) -> None:
        made = Path(tempfile.mkdtemp(prefix=f".{self._entry.name}.", dir=self.cache_dir))
        try:
            self._make(made)
            self._put(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _clear(self) -> None:
        """Removes what killed processes have left, and older versions that nobody holds."""
        for left in self.cache_dir.glob(f".{self._key}*"):
            shutil.rmtree(left, ignore_errors=True)
        for entry in self.cache_dir.glob(f"{self._key}-*"):
            if entry != self._entry and not _is_held(entry):
                shutil.rmtree(entry, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keeps other processes of the node from this entry, those of other jobs as well."""
        import filelock

        lock = filelock.FileLock(self.cache_dir / f"{self._key}.lock")
        while True:
            self._go_on()
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=POLL_SECONDS)
                break
        try:
            yield
        finally:
            lock.release()

    def _is_there(self) -> bool:
        try:
            note = json.loads((self._entry / NOTE).read_text())
        except (OSError, ValueError):
            return False
        if self.path.is_dir():
            return True  # the checksum of its archive is part of the entry's name
        if not self.path.is_file() or self.path.stat().st_size != note["nbytes"]:
            return False
        if self.sha256 is None:
            return True
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def _stamp(self) -> list[int] | None:
        """Returns what tells whether the source has changed, where that can be seen."""
        if is_url(self.source):
            return None
        status = os.stat(self.source)
        return [status.st_size, status.st_mtime_ns]

    def _make(self, folder: Path) -> None:
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
        nbytes = None if target.is_dir() else target.stat().st_size
        (folder / NOTE).write_text(json.dumps({"nbytes": nbytes}))

    def _copy(self, target: Path) -> None:
        """Writes the bytes of the source into a file, and checks them."""
        with self._opened() as file, open(target, "xb") as copy:
            digest = self._pour(file, copy)
        self._check_length()
        if self.sha256 not in (None, digest):
            raise OSError(f"its SHA-256 is {digest} and not {self.sha256}")

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
            self._pour(file, copy)

    def _pour(self, file: BinaryIO, copy: BinaryIO) -> str:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK_NBYTES):
            self._go_on()
            digest.update(chunk)
            copy.write(chunk)
            self.done_nbytes += len(chunk)
        copy.flush()
        os.fsync(copy.fileno())
        return digest.hexdigest()

    def _put(self, made: Path) -> None:
        """Gives what was made the name of the entry, in place of one that is damaged."""
        os.sync()  # of the files of an archive, too
        with contextlib.suppress(FileNotFoundError):
            os.link(self._entry / USE, made / USE)  # who holds that one holds this one
        if self._entry.exists():
            os.replace(self._entry, made.with_suffix(".before"))
        os.replace(made, self._entry)
        shutil.rmtree(made.with_suffix(".before"), ignore_errors=True)

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise InterruptedError("another rank has failed")


def hold(path: Path) -> None:
    """Keeps an entry from being removed as long as this process lives.

    Args:
        path: what has been brought there.
    """
    entry = str(path.parent)
    if entry not in _held:
        _held[entry] = os.open(path.parent / USE, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(_held[entry], fcntl.LOCK_SH)


def _is_held(entry: Path) -> bool:
    try:
        with open(entry / USE) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _digest(facts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=10).hexdigest()


def _unpack(archive: Path, target: Path) -> None:
    """Unpacks a tar or zip file; nothing of it comes to lie outside the target."""
    target.mkdir()
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise OSError(f"it holds {name!r}, which would lie outside")
            opened.extractall(target)
    else:
        with tarfile.open(archive) as opened:
            opened.extractall(target, filter="data")
