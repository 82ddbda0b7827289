"""A file, directory or download brought into a cache, whole or not at all. Knows no ranks."""

import contextlib
import dataclasses
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

__all__ = ["Fetch", "is_url"]

CHUNK_NBYTES = 1 << 20
POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # that a server may stay silent
NOTE = "note.json"


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
        text = json.dumps([self.source, self.sha256, self.unpack])
        self._entry = self.cache_dir / hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    @property
    def path(self) -> Path:
        """Where the file, or directory, is to be found."""
        parts = urlsplit(self.source).path if is_url(self.source) else self.source
        return self._entry / (PurePosixPath(parts).name or "data")

    def run(self) -> None:
        """Brings it there, unless it is there already; waits for others that do.

        Raises:
            Exception: whatever goes wrong; then nothing of it is left.
        """
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if self._is_there():
                return
            for left in self.cache_dir.glob(f".{self._entry.name}.*"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            made = Path(tempfile.mkdtemp(prefix=f".{self._entry.name}.", dir=self.cache_dir))
            try:
                self._make(made)
                self._put(made)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        self.fetched = True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keeps other processes of the node from this entry, those of other jobs as well."""
        import filelock

        lock = filelock.FileLock(f"{self._entry}.lock")
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
        if note["stamp"] != self._stamp():
            return False
        if self.path.is_dir():
            return True  # the checksum of its archive is part of the entry's name
        if not self.path.is_file() or self.path.stat().st_size != note["nbytes"]:
            return False
        if self.sha256 is None:
            return True
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def _stamp(self) -> Any:
        """Returns what tells whether the source has changed."""
        if is_url(self.source):
            return None
        status = os.stat(self.source)
        return [status.st_size, status.st_mtime_ns]

    def _make(self, folder: Path) -> None:
        stamp = self._stamp()
        target = folder / self.path.name
        if stamp is not None and Path(self.source).is_dir():
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
        (folder / NOTE).write_text(json.dumps({"stamp": stamp, "nbytes": nbytes}))

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
        """Gives what was made the name of the entry, in place of one that is out of date."""
        os.sync()  # of the files of an archive, too
        if self._entry.exists():
            os.replace(self._entry, made.with_suffix(".before"))
        os.replace(made, self._entry)
        shutil.rmtree(made.with_suffix(".before"), ignore_errors=True)

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise InterruptedError("another rank has failed")


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
