"""A file, directory or download brought into a cache, whole or not at all. Knows no ranks.

A user's entries lie in a directory of the cache that is that user's alone. An entry is a directory,
of one version of its source: one that has changed gets another entry. It notes the digests of what
was brought; whoever finds it there compares them. A process that uses an entry holds a lock on it
as long as it lives, and so do its forks; when the source is asked for again, entries of older
versions that nobody holds are removed.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
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

from keras_dist.data.content_digests import Contents, contents_of, find_others, size_of
from keras_dist.storage.ownership import describe, find_unsafe, is_private_directory, private_name

__all__ = ["Fetch", "NotOwnError", "hold", "is_url"]

CHUNK_NBYTES = 1 << 20
POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 60.0  # that a server may stay silent
NOTE, USE = "note.json", "use"

_log = logging.getLogger("keras_dist")
_held: dict[str, int] = {}  # files that are open as long as this process lives, by entry


def is_url(source: str) -> bool:
    """Tells whether this is to be downloaded."""
    return urlsplit(source).scheme in ("http", "https")


class NotOwnError(PermissionError):
    """Something in the cache is not this user's, or others may replace it.

    Args:
        expected: what was expected of it.
        received: whose it is.
        remedy: what to do.
    """

    def __init__(self, expected: str, received: str, remedy: str):
        super().__init__(f"{expected}: {received}")
        self.expected, self.received, self.remedy = expected, received, remedy


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
        self.doing = "caching"
        self.fetched = False  # it had not been there
        self.stop = threading.Event()
        self._counting = threading.Lock()
        self._digests: dict[Path, str] = {}  # of files that have been copied
        self._key = _digest([self.source, self.sha256, self.unpack])
        self._own_dir = self.cache_dir / private_name()
        self._entry = self._own_dir / self._key

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
            NotOwnError: what is there belongs to another user, or others may replace it.
            Exception: whatever else goes wrong; then nothing of it is left.
        """
        self._own_dir = _own_directory(self.cache_dir)
        with self._lock():
            stamp = self._stamp()
            name = self._key if stamp is None else f"{self._key}-{_digest(stamp)}"
            self._entry = self._own_dir / name
            self._clear()
            if not self._is_there():
                self._bring()
                self.fetched = True
            hold(self.path)

    def _bring(self) -> None:
        self.doing, self.done_nbytes, self.total_nbytes = "caching", 0, 0
        made = Path(tempfile.mkdtemp(prefix=f".{self._entry.name}.", dir=self._own_dir))
        try:
            self._make(made)
            self._put(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _clear(self) -> None:
        """Removes what killed processes have left, and older versions that nobody holds."""
        for left in self._own_dir.glob(f".{self._key}*"):
            shutil.rmtree(left, ignore_errors=True)
        for entry in self._own_dir.glob(f"{self._key}-*"):
            if entry != self._entry and not _is_held(entry):
                shutil.rmtree(entry, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keeps other processes of the node from this entry, those of other jobs as well."""
        import filelock

        lock = filelock.FileLock(self._own_dir / f"{self._key}.lock")
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
        """Tells whether the entry is there, and still what was brought there.

        Raises:
            NotOwnError: it, or something in it, is not this user's.
        """
        if not os.path.lexists(self._entry):
            return False
        self._check_owner()
        if self._is_as_it_was():
            return True
        _log.warning("%s is not what was brought there any more: it is brought again.", self.path)
        return False

    def _check_owner(self) -> None:
        note = self._entry / NOTE
        other = next((p for p in (self._entry, note, self.path) if p.is_symlink()), None)
        other = other or find_others(self._entry)
        if other is not None:
            raise NotOwnError(
                f"{other}, in the cache, to be of this user and no link",
                describe(other),
                f"Find out who has put it there, and remove {self._entry}.",
            )

    def _is_as_it_was(self) -> bool:
        try:
            noted = json.loads((self._entry / NOTE).read_text())["contents"]
            self.doing, self.total_nbytes = "verifying", size_of(self.path)
            return bool(contents_of(self.path, went_on=self._went_on) == noted)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _went_on(self, nbytes: int) -> None:
        self._go_on()
        with self._counting:
            self.done_nbytes += nbytes

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
        noted: Contents = contents_of(target, self._digests, lambda _: self._go_on())
        (folder / NOTE).write_text(json.dumps({"contents": noted}))

    def _copy(self, target: Path) -> None:
        """Writes the bytes of the source into a file, and checks them."""
        with self._opened() as file, open(target, "xb") as copy:
            digest = self._pour(file, copy)
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
            self._digests[Path(target)] = self._pour(file, copy)

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


def _own_directory(cache_dir: Path) -> Path:
    """Returns the directory of this user's entries, which nobody else can write to or replace."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    real = Path(os.path.realpath(cache_dir))  # a link may be replaced while it is used
    if (unsafe := find_unsafe(real)) is not None:
        raise NotOwnError(
            f"{unsafe} to belong to this user or root, and others not to write to it",
            describe(unsafe),
            "Pass a cache_dir in which nobody else can replace what lies there.",
        )
    own = real / private_name()
    own.mkdir(mode=0o700, exist_ok=True)
    if not is_private_directory(own):
        raise NotOwnError(
            f"{own} to be a directory of this user's alone",
            describe(own),
            "Remove it, or pass another cache_dir.",
        )
    return own


def hold(path: Path) -> None:
    """Keeps an entry from being removed as long as this process lives.

    Args:
        path: what has been brought there.
    """
    entry = str(path.parent)
    if entry not in _held:
        _held[entry] = os.open(path.parent / USE, os.O_RDWR | os.O_CREAT, 0o600)
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
            if hasattr(tarfile, "data_filter"):
                opened.extractall(target, filter="data")
            else:  # Python before 3.11.4
                opened.extractall(target, _plain(opened))


def _plain(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the members of an archive, all of which must be files or directories within it.

    Raises:
        OSError: one is not. A link could lead outside, and what follows it with it.
    """
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise OSError(f"it holds {member.name!r}, which is a link or would lie outside")
        member.uid, member.gid = os.getuid(), os.getgid()
        member.uname = member.gname = ""  # root would give files to the users of these names
        member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
        yield member
