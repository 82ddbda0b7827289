"""Copy-on-write mappings: a write is private to the process, and detected."""

import errno
import mmap
import os

import numpy as np
import pytest

from keras_dist._engine.shm import segments
from keras_dist._engine.shm.segments import PAGE, CowMapping, map_private

pytestmark = pytest.mark.skipif(
    not segments._is_supported(), reason="the kernel does not show who has written to a page"
)


@pytest.fixture
def handle():
    made = os.memfd_create("test")
    os.ftruncate(made, 4 * PAGE)
    yield made
    os.close(made)


def test_a_mapping_shows_writes_of_others_except_in_pages_it_has_written(handle):
    everyones = np.frombuffer(mmap.mmap(handle, 4 * PAGE), np.uint8)
    mapping = map_private(handle, 4 * PAGE)
    window, other = CowMapping(mapping, PAGE, PAGE + 1), CowMapping(mapping, 3 * PAGE, 10)
    seen = np.frombuffer(window.memory, np.uint8)
    assert len(seen) == PAGE + 1
    everyones[:] = 1
    assert seen.min() == 1 and not window.is_written() and not other.is_written()
    everyones[:] = 2
    assert seen.min() == 2 and not window.is_written()
    seen[-1] = 3  # on its second page
    assert window.is_written() and not other.is_written()
    assert everyones.max() == 2
    everyones[:] = 4
    assert window.is_written()
    assert (seen[:PAGE] == 4).all() and seen[-1] == 3


def test_no_mapping_where_writes_cannot_be_detected(handle, monkeypatch):
    segments._is_supported.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(segments.os, "preadv", lambda *_: 0)  # reports no pages
        assert map_private(handle, 4 * PAGE) is None
        segments._is_supported.cache_clear()
        patched.setattr(segments, "_pagemap", lambda: os.open("/proc/self/nothing", os.O_RDONLY))
        assert map_private(handle, 4 * PAGE) is None
    segments._is_supported.cache_clear()
    assert map_private(handle, 4 * PAGE) is not None


def test_a_closed_descriptor_counts_as_a_write(handle, monkeypatch):
    def closed(*_):
        raise OSError(errno.EBADF, "closed")

    window = CowMapping(map_private(handle, PAGE), 0, PAGE)
    assert not window.is_written()
    monkeypatch.setattr(segments.os, "preadv", closed)
    assert window.is_written()


def test_no_mapping_without_memory(handle, monkeypatch):
    def refused(*_):
        raise OSError("no room")

    assert map_private(handle, PAGE) is not None
    monkeypatch.setattr(segments, "_map", refused)
    assert map_private(handle, PAGE) is None
