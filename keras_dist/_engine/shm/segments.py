"""Shared memory of a node, and copy-on-write views of it. Linux. See decisions 12 and 13."""

import contextlib
import errno
import functools
import gc
import mmap
import os
import re
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
# Bits of the last byte of the 8 bytes of a page: present or swapped out; part of a file.
PRESENT, OF_FILE = 0xC0, 0x20
NO_RESERVE = 0x4000  # MAP_NORESERVE: few pages, if any, are written to
DIRECTORY = "/dev/shm"
PREFIX = "keras_dist"


def map_private(handle: int, nbytes: int) -> mmap.mmap | None:
    """Maps a file copy-on-write; returns `None` where the system does not support it."""
    if not _is_supported():
        return None
    try:
        return _map(handle, nbytes)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


class CowMapping:
    """A part of a copy-on-write mapping: a write is private to this process.

    The kernel copies a page when the process writes to it; from then on the page does not show what
    other processes write. `/proc/self/pagemap` says which pages have been copied.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, nbytes: int):
        self.memory = memoryview(mapping)[offset : offset + nbytes]
        self._entries = bytearray(8 * -(-nbytes // PAGE))
        address = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]
        self._offset = 8 * (address // PAGE)

    def is_written(self, nbytes: int | None = None) -> bool:
        """Returns whether this process has written to the first `nbytes`; defaults to all."""
        pages = -(-(len(self.memory) if nbytes is None else nbytes) // PAGE)
        entries = memoryview(self._entries)[: 8 * pages]
        try:
            found = os.preadv(_pagemap(), [entries], self._offset)
        except OSError:  # the descriptor was closed by other code
            found = 0
        if found < len(entries):
            return True  # unknown: assume a write
        kinds = np.frombuffer(entries, np.uint8)[7::8]
        return bool(np.any((kinds & PRESENT != 0) & (kinds & OF_FILE == 0)))


def _map(handle: int, nbytes: int) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(handle, nbytes, mmap.MAP_PRIVATE | NO_RESERVE, access)


@functools.cache
def _pagemap() -> int:
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


@functools.cache
def _is_supported() -> bool:
    """Tries whether a mapping shows writes of others, and pagemap those of this process."""
    try:
        handle = os.memfd_create("keras_dist", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, PAGE)
            view = CowMapping(_map(handle, PAGE), 0, PAGE)
            before = view.memory[0], view.is_written()
            os.pwrite(handle, b"\1", 0)
            after = view.memory[0], view.is_written()
        finally:
            os.close(handle)
        view.memory[0] = 2
        return (before, after) == ((0, False), (1, False)) and view.is_written()
    except (AttributeError, OSError):
        return False


class Segment:
    """Shared memory of one node, mapped and populated."""

    def __init__(self, handle: int, nbytes: int, private_view: bool = False):
        mapping = mmap.mmap(handle, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory = np.frombuffer(mapping, np.uint8)
        self._private = map_private(handle, nbytes) if private_view else None

    def array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        return self.memory[offset : offset + count * dtype.itemsize].view(dtype)

    def private_view(self, offset: int, nbytes: int) -> CowMapping | None:
        """Returns the copy-on-write view of a part that starts on a page, if there is one."""
        return None if self._private is None else CowMapping(self._private, offset, nbytes)


def make_segment(
    nbytes: int, rank: int, allgather: Callable[[Any], list[Any]], private_view: bool = False
) -> tuple[Segment | None, str | None]:
    """Makes a segment for all ranks of a node, or returns the reason. Collective on the node."""
    # The other ranks open the file through /proc of the rank that made it, so it needs no name, and
    # no file is left even if a rank is killed meanwhile. If a rank does not see it there, as from
    # another container, the file has a name while the ranks open it.
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
    # /proc may hide processes, or be that of another namespace.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True
