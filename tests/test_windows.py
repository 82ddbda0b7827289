"""Shared memory through a window: what a process writes there stays its own, and is seen."""

import errno
import mmap
import os

import numpy as np
import pytest

from keras_dist._engine import windows
from keras_dist._engine.windows import PAGE, Window, map_private

pytestmark = pytest.mark.skipif(
    not windows._writes_are_seen(), reason="the kernel does not show who has written to a page"
)


@pytest.fixture
def handle():
    made = os.memfd_create("test")
    os.ftruncate(made, 4 * PAGE)
    yield made
    os.close(made)


def test_a_window_shows_what_others_write_but_not_where_it_was_written_to(handle):
    everyones = np.frombuffer(mmap.mmap(handle, 4 * PAGE), np.uint8)
    mapping = map_private(handle, 4 * PAGE)
    window, other = Window(mapping, PAGE, PAGE + 1), Window(mapping, 3 * PAGE, 10)
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


def test_there_are_no_windows_where_writes_are_not_seen(handle, monkeypatch):
    windows._writes_are_seen.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(windows.os, "preadv", lambda *_: 0)  # tells nothing of the pages
        assert map_private(handle, 4 * PAGE) is None
        windows._writes_are_seen.cache_clear()
        patched.setattr(windows, "_pagemap", lambda: os.open("/proc/self/nothing", os.O_RDONLY))
        assert map_private(handle, 4 * PAGE) is None
    windows._writes_are_seen.cache_clear()
    assert map_private(handle, 4 * PAGE) is not None


def test_nothing_is_known_where_what_was_open_is_closed(handle, monkeypatch):
    def closed(*_):
        raise OSError(errno.EBADF, "closed")

    window = Window(map_private(handle, PAGE), 0, PAGE)
    assert not window.is_written()
    monkeypatch.setattr(windows.os, "preadv", closed)
    assert window.is_written()


def test_there_are_no_windows_where_there_is_no_room(handle, monkeypatch):
    def refused(*_):
        raise OSError("no room")

    assert map_private(handle, PAGE) is not None
    monkeypatch.setattr(windows, "_map", refused)
    assert map_private(handle, PAGE) is None
