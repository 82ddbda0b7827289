"""`keras-dist run`: a failed job is restarted; a job that is terminated leaves nothing behind."""

import signal
import time

import pytest
from endings import end_of
from start_jobs import HANG_SECONDS, allowed


@pytest.fixture
def start(launch):
    """A function that starts the launcher with options and a function of `launched.py`."""
    return lambda *words: launch(*words[:-2], "launched.py", *words[-2:])


@pytest.mark.fault(
    "every run of a job fails, under `keras-dist run --max-restarts`",
    "it ends after that number of restarts, with the exit code of the last run",
    within=30,
)
def test_a_job_that_always_fails_is_given_up(start, tmp_path):
    job = start("-np", 2, "--max-restarts", 2, "end_after_init", 7)
    printed = end_of(job, tmp_path)
    assert job.returncode == 7, printed
    assert "failed with exit code 7. Restart 1 of 2 in 1 s." in printed
    assert "failed with exit code 7. Restart 2 of 2 in 2 s." in printed
    assert "failed with exit code 7, after 2 restarts." in printed


def test_a_job_that_takes_too_long_is_ended(start, tmp_path):
    began = time.monotonic()
    job = start("-np", 2, "--timeout", 3, "--max-restarts", 2, "wait", "keeps SIGTERM")
    printed = end_of(job, tmp_path)
    assert job.returncode == 124, printed
    assert 3 <= time.monotonic() - began < allowed(30)
    assert "the job was ended after its time limit (--timeout)." in printed
    assert "Restart" not in printed


@pytest.mark.short
@pytest.mark.parametrize("code", [2, 75])
def test_some_ends_are_passed_on_at_once(start, tmp_path, code):
    job = start("-np", 2, "--max-restarts", 2, "end", code)
    printed = end_of(job, tmp_path)
    assert job.returncode == code
    assert "Restart" not in printed


@pytest.mark.parametrize(("name", "code"), [("SIGUSR1", 75), ("SIGTERM", 75), ("SIGHUP", 129)])
def test_a_launcher_that_is_told_to_end_before_a_restart_says_that_another_may_go_on(
    start, name, code
):
    job = start("-np", 1, "--max-restarts", 2, "end", 7)
    while "Restart 1 of 2 in 1 s." not in (line := job.stdout.readline()):
        assert line, "the job ended"
    job.send_signal(signal.SIGUSR2)  # has a meaning on ranks only
    time.sleep(0.1)
    job.send_signal(getattr(signal, name))
    printed, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == code, printed
    assert f"received {name} between two runs of the job." in printed
    assert "Restart 2" not in printed


@pytest.mark.fault(
    "Ctrl-C, SIGTERM, SIGHUP or SIGKILL to `keras-dist run`",
    "all ranks end, nothing is left, and the job does not restart",
    within=5,
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_launcher_that_is_told_to_end_leaves_nothing(start, tmp_path, name):
    job = start("-np", 2, "--max-restarts", 2, "wait", "")
    wait_until_ready(job)
    told = time.monotonic()
    job.send_signal(number := getattr(signal, name))
    printed = end_of(job, tmp_path)
    assert job.returncode == (128 + number if name != "SIGKILL" else -number), printed
    assert time.monotonic() - told < allowed(5)
    assert "Restart" not in printed


@pytest.mark.fault(
    "Ctrl-C twice to `keras-dist run` whose ranks ignore it",
    "all ranks are killed, and nothing is left",
    within=5,
)
def test_a_second_interrupt_kills(start, tmp_path):
    job = start("-np", 2, "wait", "ignores SIGINT")
    wait_until_ready(job)
    told = time.monotonic()
    job.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.send_signal(signal.SIGINT)
    end_of(job, tmp_path)
    assert job.returncode == 128 + signal.SIGINT
    assert time.monotonic() - told < allowed(5)


def wait_until_ready(job):
    """Reads the output of a job until both ranks wait."""
    ready = 0
    while ready < 2:
        line = job.stdout.readline()
        assert line, "the job ended"
        ready += line.count("ready")
