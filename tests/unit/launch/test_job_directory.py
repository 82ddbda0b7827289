"""The directory in which a job and the processes that want to join it find each other."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from keras_dist.runtime import job_directory
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


def test_of_processes_that_find_the_same_one_ended_one_takes_its_place(
    directory, tmp_path, monkeypatch
):
    place = tmp_path / f"place-{os.uname().nodename}-0.json"
    ended = {"host": os.uname().nodename, "pid": ended_process()}
    place.write_text(json.dumps(ended))
    read = JobDirectory._read
    taken = []

    def read_and_let_another_claim(self, name):
        found = read(self, name)
        if not taken:
            taken.append(None)
            taken.append(directory.claim(0))
        return found

    monkeypatch.setattr(JobDirectory, "_read", read_and_let_another_claim)
    assert (directory.claim(0), taken[1]) == (1, 0)
    assert json.loads(place.read_text())["pid"] == os.getpid()


def test_a_process_does_not_wait_for_a_job_that_gives_no_sign(directory, tmp_path):
    directory.announce({"host": "elsewhere", "pid": 1})
    name = directory.request({"host": "elsewhere", "pid": 2})
    with pytest.raises(TimeoutError, match=r"no sign of the job for 0\.05 s"):
        directory.wait_for_answer(name, 0.05)
    assert directory.requests() == {}


def test_signs_of_the_job_prolong_the_wait(directory, tmp_path, monkeypatch):
    """The clock stands still while the file of the job changes, and each look at it is 10 s."""
    directory.announce({"host": "elsewhere", "pid": 1})
    name, looks = directory.request({"host": "elsewhere", "pid": 2}), []
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(
        job_directory, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=looks.append)
    )

    def changed(self, name):
        if len(looks) == 20:
            self.answer(name_of_request, {"port": "p"})
        return len(looks)

    name_of_request = name
    monkeypatch.setattr(JobDirectory, "_changed", changed)
    assert directory.wait_for_answer(name, 15) == {"port": "p"}


def test_the_root_looks_for_requests_once_a_second(directory, monkeypatch):
    now, listed = [100.0], []
    monkeypatch.setattr(job_directory, "time", SimpleNamespace(monotonic=lambda: now[0]))
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    directory.announce({"host": "elsewhere", "pid": 1})
    before = directory._changed(job_directory.JOB)
    assert [directory.is_asked() for _ in range(100)] == [False] * 100
    assert len(listed) == 1
    assert directory._changed(job_directory.JOB) != before
    directory.request({"host": "elsewhere", "pid": 2})
    now[0] += 1
    assert [directory.is_asked(), directory.is_asked()] == [True, False]


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
