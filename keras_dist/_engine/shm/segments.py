"""Shared memory of the ranks of a node, and the barrier in it. Linux; independent of MPI.

A segment is a file in `/dev/shm` without a name, or with a name only while the ranks open it. Its
pages are reserved when it is made, so a full `/dev/shm` is an error at that moment and not a crash
later. However the job ends, the kernel frees the segment with the last process.
"""

import contextlib
import errno
import gc
import mmap
import os
import re
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.shm.cow_mapping import CowMapping, map_private
from keras_dist._engine.shm.wait import Counter, waiting

DIRECTORY = "/dev/shm"
PREFIX = "keras_dist"
LINE = 64  # bytes of a cache line: no two ranks write to one line
DIGEST_NBYTES = 16


class Segment:
    """Shared memory of one node, mapped and populated.

    Args:
        nbytes: size in bytes.
    """

    def __init__(self, handle: int, nbytes: int, private_view: bool = False):
        populate = getattr(mmap, "MAP_POPULATE", 0)
        mapping = mmap.mmap(handle, nbytes, mmap.MAP_SHARED | populate)
        self.memory = np.frombuffer(mapping, np.uint8)
        self._private = map_private(handle, nbytes) if private_view else None

    def array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns `count` elements that start `offset` bytes into the segment."""
        return self.memory[offset : offset + count * dtype.itemsize].view(dtype)

    def private_view(self, offset: int, nbytes: int) -> CowMapping | None:
        """Returns the copy-on-write view of a part that starts on a page, if there is one."""
        return None if self._private is None else CowMapping(self._private, offset, nbytes)


def make_segment(
    nbytes: int, rank: int, allgather: Callable[[Any], list[Any]], private_view: bool = False
) -> tuple[Segment | None, str | None]:
    """Makes a segment for all ranks of a node.

    The file has no name: the other ranks open it through /proc of the rank that made it, so no file
    is left, even if a rank is killed meanwhile. If a rank does not see it there, as from another
    container, the file has a name while the ranks open it.

    Collective: every rank of the node.

    Args:
        nbytes: size in bytes, at least 1; the same on all ranks.

    Returns:
        The segment and `None`, or `None` and the reason; the same on all ranks.
    """
    create = _create_nameless
    segment, reasons = _open_segment(create, nbytes, rank, allgather, private_view)
    if any(isinstance(reason, _NotVisible) for reason in reasons):
        create = _create_named
        segment, reasons = _open_segment(create, nbytes, rank, allgather, private_view)
    if reasons:
        gc.collect()  # models that nobody uses, which refer to themselves, may hold the memory
        segment, reasons = _open_segment(create, nbytes, rank, allgather, private_view)
    return (None, reasons[0]) if reasons else (segment, None)


class _NotVisible(str):
    """The reason of a rank that does not see the file of another rank."""


class TooManyFiles(str):
    """The reason of a rank that may open no more files; a segment takes two."""


_Made = tuple[str, int, str | None]


def _open_segment(
    create: Callable[[int], _Made],
    nbytes: int,
    rank: int,
    allgather: Callable[[Any], list[Any]],
    private_view: bool,
) -> tuple[Segment | None, list[str]]:
    """Makes a segment; returns it and the reasons of ranks that cannot use it."""
    path, handle, reason = create(nbytes) if rank == 0 else ("", -1, None)
    segment = None
    try:
        identity = _identity(os.fstat(handle)) if handle >= 0 else None
        path, identity, reason = allgather((path, identity, reason))[0]
        if reason is None and rank > 0:
            handle, reason = _open(path, identity)
        if reason is None:
            try:
                segment = Segment(handle, nbytes, private_view)
            except OSError as error:
                reason = _reason(f"{path} cannot be mapped", error)
        reasons = [text for text in allgather(reason) if text is not None]
    finally:  # even if a rank has died meanwhile
        if handle >= 0:
            os.close(handle)
        if rank == 0 and path.startswith(DIRECTORY):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return (None if reasons else segment), reasons


def _open(path: str, identity: Any) -> tuple[int, str | None]:
    """Opens the file of another rank; returns its descriptor and the reason if it fails."""
    try:
        # In another container the path may lead to another file.
        if _identity(os.stat(path)) == identity:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC), None
        return -1, _NotVisible(f"{path} is another file for this rank")
    except OSError as error:
        return -1, _reason(f"{path} cannot be opened", error, _NotVisible)


def _reason(what: str, error: OSError, kind: type[str] = str) -> str:
    """Returns the reason why memory cannot be shared, of a kind unless files are used up."""
    used_up = error.errno in (errno.EMFILE, errno.ENFILE)
    return (TooManyFiles if used_up else kind)(f"{what}: {error.strerror}")


def _identity(found: os.stat_result) -> tuple[int, int]:
    """Returns the device and inode of a file."""
    return found.st_dev, found.st_ino


def clean_up(ended: Callable[[int], bool] | None = None) -> None:
    """Removes files of jobs that were killed while they made a segment."""
    with contextlib.suppress(OSError):
        for name in os.listdir(DIRECTORY):
            match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-[0-9a-f]+", name)
            if match and int(match[1]) == os.getuid():
                pid = int(match[2])
                if not _alive(pid) or (ended is not None and ended(pid)):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(DIRECTORY, name))


def _create_nameless(nbytes: int) -> _Made:
    """Makes the file; returns its path, its descriptor, and the reason if it fails."""
    try:
        handle = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except AttributeError:  # another system
        return "", -1, _NotVisible(f"no file without a name can be made in {DIRECTORY}")
    except OSError as error:  # maybe a file system without such files
        what = f"no file without a name can be made in {DIRECTORY}"
        return "", -1, _reason(what, error, _NotVisible)
    if reason := _reserve(handle, nbytes):
        os.close(handle)
        return "", -1, reason
    return f"/proc/{os.getpid()}/fd/{handle}", handle, None


def _create_named(nbytes: int) -> _Made:
    """Makes the file with a name, as `_create_nameless`."""
    path = os.path.join(DIRECTORY, f"{PREFIX}-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return "", -1, _reason(f"no file can be made in {DIRECTORY}", error)
    if reason := _reserve(handle, nbytes):
        os.unlink(path)
        os.close(handle)
        return "", -1, reason
    return path, handle, None


def _reserve(handle: int, nbytes: int) -> str | None:
    """Reserves the pages of a file: a page that is missing later would be a bus error."""
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        room = os.statvfs(DIRECTORY)
        free = room.f_bavail * room.f_frsize
        return (
            f"{DIRECTORY} has {free / 2**20:.0f} MiB of room, {nbytes / 2**20:.0f} MiB are "
            f"needed ({error.strerror})"
        )
    return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class ShmBarrier:
    """A barrier of the ranks of a node, which compares their digests.

    Each rank has a counter of its barriers and two slots for a digest, used in turn. A rank that
    has left barrier k may write the digest of barrier k + 1 into the other slot. It writes to the
    first slot again in barrier k + 2, which it enters only after all ranks have left barrier k,
    that is, have read its digests.

    Args:
        segment: at least `nbytes_for(size)` bytes.
    """

    LINES = 3  # counter, two digests

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        check: Callable[[], None],
        fence: Callable[[], None] | None = None,
    ):
        self._check, self._fence = check, fence
        end = self.nbytes_for(size)
        self._left = segment.memory[end - LINE : end].data
        lines = segment.memory[: end - LINE].reshape(size, self.LINES, LINE)
        self._counters = [Counter(lines[r, 0, :4].view(np.uint32), fence) for r in range(size)]
        self._mine = self._counters[rank]
        self._others = [c for r, c in enumerate(self._counters) if r != rank]
        self._views = [counter.view for counter in self._others]
        digests: list[list[Any]] = [
            [lines[r, 1 + turn, :DIGEST_NBYTES].data for r in range(size)] for turn in range(2)
        ]
        self._my_digests = [row.pop(rank) for row in digests]
        self._other_digests = digests
        self._count = 0

    @classmethod
    def nbytes_for(cls, size: int) -> int:
        """Returns the size in bytes of the barrier of `size` ranks."""
        return (size * cls.LINES + 1) * LINE

    def leave(self) -> None:
        """Releases ranks that wait here, now or later: not all ranks will arrive."""
        self._left[0] = 1
        for counter in self._counters:
            counter.wake()

    def wait(self, digest: bytes) -> bool:
        """Waits until all ranks of the node have arrived.

        Args:
            digest: 16 bytes.
        """
        self._arrive(digest)
        count = self._count
        for view in self._views:
            if (view[0] - count) % 2**32 >= 2**31:  # `has_reached`, in line: this is the short path
                self._wait()
                break
        return self._agree(digest)

    def start(self, digest: bytes) -> Callable[[], bool | None]:
        """Starts `meet` without waiting.

        Returns:
            Function that returns the answer of `meet`, or `None` while a rank is missing.
        """
        self._arrive(digest)

        def answer() -> bool | None:
            if all(counter.has_reached(self._count) for counter in self._others):
                return self._agree(digest)
            self._check_alive()
            return None

        return answer

    def _wait(self) -> None:
        with waiting:  # one wait, whichever ranks are missing
            for counter in self._others:
                counter.wait_for(self._count, self._check_alive)

    def _check_alive(self) -> None:
        if self._left[0]:
            raise errors.RankLostError("Another rank of this node has seen a rank die.")
        self._check()

    def _arrive(self, digest: bytes) -> None:
        self._count = (self._count + 1) % 2**32
        self._my_digests[self._count % 2][:] = digest
        self._mine.raise_to(self._count)

    def _agree(self, digest: bytes) -> bool:
        if self._fence is not None:
            self._fence()
        others = self._other_digests[self._count % 2]
        return others.count(digest) == len(others)
