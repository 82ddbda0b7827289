"""Test hosts whose process is killed: nothing is left."""

import subprocess
import sys
import time
from pathlib import Path

import namespaces
from namespaces import hosts_or_skip
from start_jobs import HANG_SECONDS, is_alive


def test_nothing_is_left_after_a_kill():
    with hosts_or_skip(1):  # or the test is skipped
        pass
    there = ["sh", "-c", "echo $$ $TEST_HOSTS_REACH; exec sleep 99"]
    command = [sys.executable, namespaces.__file__, "2", *there]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid, reach = process.stdout.readline().split()
        folder = Path(reach).parent
        assert is_alive(pid) and folder.exists()
        process.kill()
    end = time.monotonic() + HANG_SECONDS
    while (is_alive(pid) or folder.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)
    assert not folder.exists()
