"""Memory that all ranks of a node see, and how they meet in it. Linux; knows no MPI.

A segment is a file in `/dev/shm` that has no name, or one only while the ranks open it. Its pages
are reserved when it is made, so a full `/dev/shm` is an error at that moment and not a crash
later; whatever end the job comes to, the kernel frees it with the last process.
"""

import contextlib
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

__all__ = ["DIRECTORY", "Segment", "ShmBarrier", "clean_up", "make_segment"]

DIRECTORY = "/dev/shm"
PREFIX = "keras_dist"
LINE = 64  # bytes of a cache line: what two ranks write lies on two
DIGEST_NBYTES = 16


class Segment:
    """Shared memory of one node, mapped and touched.

    Args:
        handle: file descriptor of the file behind it; needed no longer.
        nbytes: its size.
        windows: whether there should be windows to it, where that is possible.
    """

    def __init__(self, handle: int, nbytes: int, windows: bool = False):
        populate = getattr(mmap, "MAP_POPULATE", 0)
        mapping = mmap.mmap(handle, nbytes, mmap.MAP_SHARED | populate)
        self.memory = np.frombuffer(mapping, np.uint8)
        self._private = map_private(handle, nbytes) if windows else None

    def array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns `count` elements that start `offset` bytes into the segment."""
        return self.memory[offset : offset + count * dtype.itemsize].view(dtype)

    def window(self, offset: int, nbytes: int) -> CowMapping | None:
        """Returns a window to a part that begins on a page; `None` where there are none."""
        return None if self._private is None else CowMapping(self._private, offset, nbytes)


def make_segment(
    nbytes: int, rank: int, share: Callable[[Any], list[Any]], windows: bool = False
) -> tuple[Segment | None, str | None]:
    """Makes a segment for all ranks of a node.

    The file behind it has no name: the ranks open it where /proc shows what the maker has open, so
    nothing stays, whoever is killed meanwhile. Where one of them does not see it there, as from
    another container, it has a name while they open it.

    Collective: every rank of the node.

    Args:
        nbytes: its size, at least 1; the same on all ranks.
        rank: this rank on the node; 0 makes the file.
        share: gives every rank's object to all ranks of the node, in rank order.
        windows: see `Segment`; ranks may differ in it.

    Returns:
        The segment and `None`; or `None` and the reason, on every rank alike.
    """
    segment, troubles = _share_segment(_create_nameless, nbytes, rank, share, windows)
    if any(isinstance(trouble, _Unseen) for trouble in troubles):
        segment, troubles = _share_segment(_create_named, nbytes, rank, share, windows)
    return (None, str(troubles[0])) if troubles else (segment, None)


class _Unseen(str):
    """Says that a rank does not see the file that another one has made."""


_Made = tuple[str, int, str | None]


def _share_segment(
    create: Callable[[int], _Made],
    nbytes: int,
    rank: int,
    share: Callable[[Any], list[Any]],
    windows: bool,
) -> tuple[Segment | None, list[str]]:
    """Makes a segment; returns it and what is in the way of ranks, on every rank alike."""
    path, handle, trouble = create(nbytes) if rank == 0 else ("", -1, None)
    segment = None
    try:
        identity = _identity(os.fstat(handle)) if handle >= 0 else None
        path, identity, trouble = share((path, identity, trouble))[0]
        if trouble is None and rank > 0:
            handle, trouble = _open(path, identity)
        if trouble is None:
            try:
                segment = Segment(handle, nbytes, windows)
            except OSError as error:
                trouble = f"{path} cannot be mapped: {error.strerror}"
        troubles = [text for text in share(trouble) if text is not None]
    finally:  # also where a rank has died meanwhile
        if handle >= 0:
            os.close(handle)
        if rank == 0 and path.startswith(DIRECTORY):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return (None if troubles else segment), troubles


def _open(path: str, identity: Any) -> tuple[int, str | None]:
    """Opens a file that another rank has made; returns its descriptor and what is in the way."""
    try:
        # Under another container's /proc it may be a file of somebody else's.
        if _identity(os.stat(path)) == identity:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC), None
        return -1, _Unseen(f"{path} is another file for this rank")
    except OSError as error:
        return -1, _Unseen(f"{path} cannot be opened: {error.strerror}")


def _identity(found: os.stat_result) -> tuple[int, int]:
    """Returns what no other file of the machine has."""
    return found.st_dev, found.st_ino


def clean_up(ended: Callable[[int], bool] | None = None) -> None:
    """Removes what a job left that was killed while it made a segment.

    Args:
        ended: tells of a process that lives whether it is about to end. Defaults to none.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(DIRECTORY):
            match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-[0-9a-f]+", name)
            if match and int(match[1]) == os.getuid():
                pid = int(match[2])
                if not _alive(pid) or (ended is not None and ended(pid)):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(DIRECTORY, name))


def _create_nameless(nbytes: int) -> _Made:
    """Makes the file; returns where others see it, its descriptor, and what is in the way."""
    try:
        handle = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):  # another system, or what lies there knows no such files
        return "", -1, _Unseen(f"no file without a name can be made in {DIRECTORY}")
    if trouble := _reserve(handle, nbytes):
        os.close(handle)
        return "", -1, trouble
    return f"/proc/{os.getpid()}/fd/{handle}", handle, None


def _create_named(nbytes: int) -> _Made:
    """As `_create_nameless`."""
    path = os.path.join(DIRECTORY, f"{PREFIX}-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return "", -1, f"no file can be made in {DIRECTORY}: {error.strerror}"
    if trouble := _reserve(handle, nbytes):
        os.unlink(path)
        os.close(handle)
        return "", -1, trouble
    return path, handle, None


def _reserve(handle: int, nbytes: int) -> str | None:
    """Takes the pages of a file now: one that is missing later would be a bus error."""
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
    """Where the ranks of a node wait for each other and show what they are about to do.

    Each rank has a counter of its meetings and two places for a digest, used in turn. A rank
    that has left meeting k may write the digest of meeting k + 1 into the other place; it
    comes back to this one only at meeting k + 2, and to get there all ranks must have left
    meeting k, that is, have read its digests.

    Args:
        segment: at least `nbytes_for(size)` bytes.
        rank: this rank on the node.
        size: the number of ranks on the node.
        check: called now and then by a rank that waits, and raises when a rank has died.
    """

    LINES = 3  # counter, two digests

    def __init__(self, segment: Segment, rank: int, size: int, check: Callable[[], None]):
        self._check = check
        end = self.nbytes_for(size)
        self._left = segment.memory[end - LINE : end].data
        lines = segment.memory[: end - LINE].reshape(size, self.LINES, LINE)
        self._counters = [Counter(lines[r, 0, :4].view(np.uint32)) for r in range(size)]
        self._mine = self._counters[rank]
        self._others = [c for r, c in enumerate(self._counters) if r != rank]
        self._digests = [
            [lines[r, 1 + turn, :DIGEST_NBYTES].data for r in range(size)] for turn in range(2)
        ]
        self._rank = rank
        self._meetings = 0

    @classmethod
    def nbytes_for(cls, size: int) -> int:
        """Returns how many bytes the meeting place of `size` ranks takes."""
        return (size * cls.LINES + 1) * LINE

    def leave(self) -> None:
        """Tells whoever waits here, or will, that not all ranks will come any more."""
        self._left[0] = 1
        for counter in self._counters:
            counter.wake()

    def meet(self, digest: bytes) -> bool:
        """Waits until all ranks of the node have come here.

        Args:
            digest: 16 bytes to show to the others.

        Returns:
            Whether all ranks have shown the same digest; the answer is the same on all.
        """
        self._arrive(digest)
        for counter in self._others:
            if not counter.has_reached(self._meetings):
                self._wait()
                break
        return self._agree(digest)

    def come(self, digest: bytes) -> Callable[[], bool | None]:
        """Comes to a meeting as `meet` does, and does not wait for it.

        Returns:
            What tells the answer of `meet`; `None` as long as a rank is missing.
        """
        self._arrive(digest)

        def answer() -> bool | None:
            if all(counter.has_reached(self._meetings) for counter in self._others):
                return self._agree(digest)
            self._look()
            return None

        return answer

    def _wait(self) -> None:
        with waiting:  # one wait, whoever is missing
            for counter in self._others:
                counter.wait_for(self._meetings, self._look)

    def _look(self) -> None:
        if self._left[0]:
            raise errors.RankLostError("Another rank of this node has lost one.")
        self._check()

    def _arrive(self, digest: bytes) -> None:
        self._meetings = (self._meetings + 1) % 2**32
        self._digests[self._meetings % 2][self._rank][:] = digest
        self._mine.raise_to(self._meetings)

    def _agree(self, digest: bytes) -> bool:
        return all(other == digest for other in self._digests[self._meetings % 2])
