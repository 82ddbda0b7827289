"""Test hosts whose process is killed: nothing is left."""

import subprocess
import sys
from pathlib import Path

import namespaces
from namespaces import hosts_or_skip
from start_jobs import is_alive, wait_for


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
    assert wait_for(lambda: not is_alive(pid))
    assert wait_for(lambda: not folder.exists())
