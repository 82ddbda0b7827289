"""Copy-on-write mappings of shared memory: a write is private to this process.

The kernel copies a page of such a mapping when the process writes to it; from then on the page does
not show what other processes write. `/proc/self/pagemap` says which pages have been copied. Linux;
independent of MPI.
"""

import errno
import functools
import mmap
import os

import numpy as np

PAGE = mmap.PAGESIZE
# Bits of the last byte of the 8 bytes of a page: present or swapped out; part of a file.
PRESENT, OF_FILE = 0xC0, 0x20
NO_RESERVE = 0x4000  # MAP_NORESERVE: few pages, if any, are written to


def map_private(handle: int, nbytes: int) -> mmap.mmap | None:
    """Maps a file copy-on-write; returns `None` where the system does not support it.

    Args:
        nbytes: size of the file.
    """
    if not _is_supported():
        return None
    try:
        return _map(handle, nbytes)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


class CowMapping:
    """A part of a copy-on-write mapping.

    Args:
        offset: offset in bytes, a multiple of the page size.
        nbytes: size of the part.
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
