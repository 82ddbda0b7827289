"""The directory in which a job and the processes that want to join it find each other."""

import json
import os
import subprocess
import sys

import pytest

from keras_dist.runtime.job_directory import JobDirectory, is_alive


@pytest.fixture
def directory(tmp_path):
    return JobDirectory(str(tmp_path))


def ended_process():
    """Returns the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_processes_claim_different_local_ranks(directory):
    assert [directory.claim(2) for _ in range(3)] == [2, 3, 4]


def test_the_claim_of_a_process_that_has_ended_is_free(directory, tmp_path):
    host = os.uname().nodename
    held = {"host": host, "pid": ended_process()}
    (tmp_path / f"place-{host}-0.json").write_text(json.dumps(held))
    assert directory.claim(0) == 0
    assert directory.claim(0) == 1


def test_a_job_whose_directory_is_gone_has_no_place(tmp_path):
    assert JobDirectory(str(tmp_path / "none")).claim(0) is None


def test_what_a_dead_job_has_left_is_removed(directory, tmp_path):
    directory.announce({"size": 2})
    directory.request({"host": "h1", "pid": 1})
    directory.answer(directory.request({"host": "h2", "pid": 1}), {"port": "p"})
    directory.claim(0)
    (tmp_path / "of the user").touch()
    directory.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["of the user"]


def test_a_directory_that_is_not_there_is_clear(tmp_path):
    JobDirectory(str(tmp_path / "none")).clear()
    assert not (tmp_path / "none").exists()


def test_a_process_that_waits_for_its_parent_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it ends
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid)
    process.wait()
    assert is_alive(os.getpid()) and not is_alive(process.pid)
