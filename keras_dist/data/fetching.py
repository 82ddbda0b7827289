"""Atomic copies of files, directories and downloads into a cache. Independent of ranks.

The entries of a user are in a directory of the cache that only this user can access. An entry is a
directory for one version of its source: a changed source gets another entry. It records digests of
its files, which are compared at every use. A process that uses an entry holds a lock on it as long
as it lives, and so do its forks; a later request for the source removes entries of older versions
without a lock.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from keras_dist.data.archives import unpack
from keras_dist.data.cache_directory import USE, NotOwnError, hold, is_held, own_directory
from keras_dist.data.content_digests import Contents, contents_of, find_others, size_of
from keras_dist.storage.ownership import describe, private_name

CHUNK_NBYTES = 1 << 20
POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # without data from a server
NOTE = "note.json"

_log = logging.getLogger("keras_dist")


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
        self.doing = "caching"
        self.fetched = False  # whether it was copied by `run`
        self.stop = threading.Event()
        self._counting = threading.Lock()
        self._digests: dict[Path, str] = {}  # of copied files
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
        self._own_dir = own_directory(self.cache_dir)
        with self._lock():
            stamp = self._stamp()
            name = self._key if stamp is None else f"{self._key}-{_digest(stamp)}"
            self._entry = self._own_dir / name
            self._remove_unused()
            if not self._is_valid():
                self._copy_entry()
                self.fetched = True
            hold(self.path)

    def _copy_entry(self) -> None:
        self.doing, self.done_nbytes, self.total_nbytes = "caching", 0, 0
        made = Path(tempfile.mkdtemp(prefix=f".{self._entry.name}.", dir=self._own_dir))
        try:
            self._fill(made)
            self._publish(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _remove_unused(self) -> None:
        """Removes files of killed processes, and older versions without a lock."""
        for left in self._own_dir.glob(f".{self._key}*"):
            shutil.rmtree(left, ignore_errors=True)
        for entry in self._own_dir.glob(f"{self._key}-*"):
            if entry != self._entry and not is_held(entry):
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
        """Returns whether the entry exists and has its recorded digests."""
        if not os.path.lexists(self._entry):
            return False
        self._check_owner()
        if self._has_digests():
            return True
        _log.warning("%s has changed since it was copied: it is copied again.", self.path)
        return False

    def _check_owner(self) -> None:
        note = self._entry / NOTE
        other = next((p for p in (self._entry, note, self.path) if p.is_symlink()), None)
        other = other or find_others(self._entry)
        if other is not None:
            raise NotOwnError(
                f"{other}, in the cache, to belong to this user and not to be a link",
                describe(other),
                f"Find out who has made it, and remove {self._entry}.",
            )

    def _has_digests(self) -> bool:
        try:
            recorded = json.loads((self._entry / NOTE).read_text())["contents"]
            self.doing, self.total_nbytes = "verifying", size_of(self.path)
            return bool(contents_of(self.path, on_read=self._count) == recorded)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _count(self, nbytes: int) -> None:
        self._check_stop()
        with self._counting:
            self.done_nbytes += nbytes

    def _stamp(self) -> list[int] | None:
        """Returns size and modification time of the source; `None` for a download."""
        if is_url(self.source):
            return None
        status = os.stat(self.source)
        return [status.st_size, status.st_mtime_ns]

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
            unpack(archive, target)
            archive.unlink()
        else:
            self._copy(target)
        contents: Contents = contents_of(target, self._digests, lambda _: self._check_stop())
        (folder / NOTE).write_text(json.dumps({"contents": contents}))

    def _copy(self, target: Path) -> None:
        """Copies the source to a file, and checks it."""
        with self._opened() as file, open(target, "xb") as copy:
            digest = self._copy_bytes(file, copy)
        self._check_length()
        if self.sha256 not in (None, digest):
            raise OSError(f"its SHA-256 is {digest} and not {self.sha256}")
        self._digests[target] = digest

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
            self._digests[Path(target)] = self._copy_bytes(file, copy)

    def _copy_bytes(self, file: BinaryIO, copy: BinaryIO) -> str:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK_NBYTES):
            self._check_stop()
            digest.update(chunk)
            copy.write(chunk)
            self.done_nbytes += len(chunk)
        copy.flush()
        os.fsync(copy.fileno())
        return digest.hexdigest()

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
