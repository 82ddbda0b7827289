"""Shared memory as one process sees it that may write there: what it writes stays its own.

The kernel gives a page of such a mapping to the process when it writes there. From then on the page
shows no more what others write. Which pages are the process' own is what `/proc/self/pagemap`
tells. Linux; knows no MPI.
"""

import functools
import mmap
import os

import numpy as np

__all__ = ["PAGE", "CowMapping", "map_private"]

PAGE = mmap.PAGESIZE
# Bits of the last byte of a page's entry of 8 bytes: present or swapped out; of a file.
THERE, OF_FILE = 0xC0, 0x20
NO_RESERVE = 0x4000  # MAP_NORESERVE: few pages, if any, are written to


def map_private(handle: int, nbytes: int) -> mmap.mmap | None:
    """Maps a file so that others do not see what is written; `None` where that is not possible.

    Args:
        handle: its file descriptor; needed no longer.
        nbytes: its size.
    """
    if not _writes_are_seen():
        return None
    try:
        return _map(handle, nbytes)
    except OSError:
        return None


class CowMapping:
    """A part of such a mapping.

    Args:
        mapping: see `map_private`.
        offset: where it begins, in bytes: at a page.
        nbytes: its size.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, nbytes: int):
        self.memory = memoryview(mapping)[offset : offset + nbytes]
        self._entries = bytearray(8 * -(-nbytes // PAGE))
        address = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]
        self._place = 8 * (address // PAGE)

    def is_written(self) -> bool:
        """Tells whether pages there have become this process' own, as they do when it writes."""
        try:
            found = os.preadv(_pagemap(), [self._entries], self._place)
        except OSError:  # somebody has closed what was open
            found = 0
        if found < len(self._entries):
            return True  # for all that is known
        kinds = np.frombuffer(self._entries, np.uint8)[7::8]
        return bool(np.any((kinds & THERE != 0) & (kinds & OF_FILE == 0)))


def _map(handle: int, nbytes: int) -> mmap.mmap:
    reach = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(handle, nbytes, mmap.MAP_PRIVATE | NO_RESERVE, reach)


@functools.cache
def _pagemap() -> int:
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


@functools.cache
def _writes_are_seen() -> bool:
    """Tells whether windows show what others write, and pages what was written: tries it."""
    try:
        handle = os.memfd_create("keras_dist", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, PAGE)
            window = CowMapping(_map(handle, PAGE), 0, PAGE)
            before = window.memory[0], window.is_written()
            os.pwrite(handle, b"\1", 0)
            after = window.memory[0], window.is_written()
        finally:
            os.close(handle)
        window.memory[0] = 2
        return (before, after) == ((0, False), (1, False)) and window.is_written()
    except (AttributeError, OSError):
        return False
