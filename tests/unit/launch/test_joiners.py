"""Slots on which processes join a running job, and the processes that the launcher starts there."""

import time

import pytest

from keras_dist import errors
from keras_dist.launch.cli import joiners
from keras_dist.launch.cli.joiners import Joiners, new_slots, slots_in_use
from keras_dist.runtime.job_directory import JobDirectory


def test_hosts_are_filled_in_turn():
    assert slots_in_use({"h1": 2, "h2": 2, "h3": 1}, 3) == {"h1": 2, "h2": 1, "h3": 0}


def test_each_further_slot_takes_one_process():
    used, busy = {"h1": 2}, {"h1": 2}
    assert new_slots({"h1": 2}, used, busy, None) == []
    assert new_slots({"h1": 3, "h2": 2}, used, busy, None) == ["h1", "h2", "h2"]
    busy = {"h1": 3, "h2": 2}
    assert new_slots({"h1": 3, "h2": 2}, used, busy, None) == []
    assert used == {"h1": 3, "h2": 2}


def test_no_more_processes_than_the_limit():
    used, busy = {"h1": 2}, {"h1": 2}
    assert new_slots({"h1": 3, "h2": 4}, used, busy, 4) == ["h1", "h2"]
    assert new_slots({"h1": 3, "h2": 4}, used, {"h1": 3, "h2": 1}, 4) == []


def test_an_answer_without_hosts_frees_no_slot_whose_process_runs():
    used, busy = {"h1": 2, "h2": 1}, {"h1": 2, "h2": 1}
    assert new_slots({}, used, busy, None) == []
    assert new_slots({"h1": 2, "h2": 1}, used, busy, None) == []


def test_a_slot_is_free_again_when_its_process_has_ended_and_it_was_not_named():
    used, busy = {"h1": 2, "h2": 1}, {"h1": 2}
    assert new_slots({"h1": 2, "h2": 1}, used, busy, None) == []
    assert new_slots({"h1": 2}, used, busy, None) == []
    assert new_slots({"h1": 2, "h2": 1}, used, busy, None) == ["h2"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A function that lets processes start beside a job, and returns what was printed meanwhile."""
    monkeypatch.setattr(joiners, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(joiners, "END_SECONDS", 0.2)
    directory = JobDirectory(str(tmp_path / "job"))
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    script.chmod(0o755)

    def command_on(host):
        if host == "unknown":
            raise errors.LaunchError("unknown is no host")
        return ["sh", "-c", f"echo {host} >> {tmp_path}/started; exec sleep 100"]

    def run(*answers, announces=True):
        (tmp_path / "answer").write_text("h1:1\n")
        beside = Joiners([str(script)], str(directory.path), {"h1": 1}, 3, command_on, {})
        with beside.beside_the_job():
            if announces:
                directory.announce({})
            for answer in answers:
                (tmp_path / "answer").write_text(answer)
                time.sleep(0.3)
        assert not beside._running
        started = tmp_path / "started"
        return started.read_text().split() if started.exists() else []

    return run


def test_a_process_starts_on_each_further_slot_and_ends_with_the_job(job):
    assert job("h1:1\nh2:1\n") == ["h2"]


def test_nothing_starts_before_the_job_announces_itself(job):
    assert job("h1:1\nh2:1\n", announces=False) == []


def test_a_host_that_cannot_be_used_leaves_the_others(job, capsys):
    assert job("h1:1\nh2:1\n", "h1:1\nh2:1\nunknown:1\n", "h1:1\nh2:1\nh3:1\n") == ["h2", "h3"]
    assert "no process was started on unknown: unknown is no host" in capsys.readouterr().err


def test_answers_that_name_no_host_change_nothing(job):
    assert job("h1:1\nh2:1\n", "", "two words\n", "h1:1\nh2:1\n") == ["h2"]
