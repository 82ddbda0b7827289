"""Processes that die while several threads wait for them."""

import subprocess
import sys
import threading

import pytest

from keras_dist._engine.shm.node import Processes


@pytest.fixture
def often_switched():
    """Switches threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_may_poll_at_the_same_time(often_switched):
    child = subprocess.Popen(["sleep", "60"])
    processes = Processes([child.pid])
    failures = []

    def look():
        try:
            for _ in range(20_000):
                assert processes.dead() == []
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child.kill()
    child.wait()
    assert failures == [] and processes.dead() == [0]
