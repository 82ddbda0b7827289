"""Signals that are not for keras_dist, while it receives signals during a fit."""

import queue
import signal
import socket

import pytest

from keras_dist import _engine
from keras_dist.runtime import signals
from keras_dist.runtime.signals import Signals


@pytest.fixture
def heard():
    """The socket that the script, such as asyncio, is woken up by."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(20)
    handler = signal.signal(signal.SIGUSR2, lambda *_: None)
    before = signal.set_wakeup_fd(theirs.fileno())
    yield ours
    assert signal.set_wakeup_fd(before) == theirs.fileno()
    signal.signal(signal.SIGUSR2, handler)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("nested", [False, True])
def test_a_signal_of_the_script_wakes_it_up_during_fit(nested, heard):
    reports = queue.SimpleQueue()
    with _engine.progress.during("fit"):
        outer = Signals(reports.put)
        if nested:
            with _engine.progress.during("fit"):
                inner = Signals(reports.put)
                signal.raise_signal(signal.SIGUSR2)
                assert heard.recv(1) == bytes([signal.SIGUSR2])
                signal.raise_signal(signal.SIGTERM)
                assert reports.get(timeout=20) == "SIGTERM"  # of the outer fit
                inner.close()
        signal.raise_signal(signal.SIGUSR2)
        assert heard.recv(1) == bytes([signal.SIGUSR2])
        outer.close()


@pytest.mark.parametrize("listens", [False, True])
def test_a_signal_that_the_launcher_has_ignored_ends_no_rank(listens, monkeypatch):
    reports = queue.SimpleQueue()
    monkeypatch.setattr(signals, "ECHO_SECONDS", -1.0)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with _engine.progress.during("fit"):
        ours = Signals(reports.put, hosts=listens)
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        ours.close()
    assert reports.qsize() == listens  # once
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN
