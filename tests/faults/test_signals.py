"""Signals of batch systems: all ranks stop after the same step, save, and set the exit code."""

import json

import pytest

from keras_dist.runtime.exit_hooks import PREEMPTED_EXIT_CODE

PREEMPTED = "all ranks end after the same step, with a backup and exit code 75"
SAID = "all 2 ranks stop, in fit, epoch {}, update {}. A backup is in {}. Start the job again"


@pytest.mark.fault(
    "a signal that the script handles itself, and one on a forked child",
    "training continues; afterwards the previous handlers are restored",
    within=60,
)
@pytest.mark.fault(
    "SIGTERM on one rank during an epoch",
    f"{PREEMPTED}; started again, the job ends with the weights of an uninterrupted one, bit for "
    "bit",
    within=15,
)
def test_sigterm_on_one_rank(fit_job, tmp_path):
    backup = tmp_path / "folder"
    ended = fit_job("signalled.py", "once")
    assert ended.returncode == PREEMPTED_EXIT_CODE, ended.stdout
    first, second = (json.loads((tmp_path / f"steps-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    epoch, batch = first[-1]
    assert (1, 3) <= (epoch, batch) <= (1, 5)  # 6 batches per epoch
    said = f"keras_dist: SIGTERM on rank 1: {SAID.format(2, batch + 1, backup)}"
    assert ended.stdout.count(said) == 1, ended.stdout
    assert "Traceback" not in ended.stdout

    fit_job("signalled.py", "resumed", epoch, batch).succeeded()


@pytest.mark.short
@pytest.mark.fault("SIGUSR1 on all ranks during validation", "the same after validation", within=15)
def test_sigusr1_on_all_ranks(fit_job, tmp_path):
    ended = fit_job("signalled.py", "in_validation")
    assert ended.returncode == PREEMPTED_EXIT_CODE, ended.stdout
    both = "keras_dist: SIGUSR1 on rank 0, SIGUSR1 on rank 1: "
    assert ended.stdout.count(both) == 1, ended.stdout
    assert SAID.format(2, 6, tmp_path / "folder") in ended.stdout
    assert len(list((tmp_path / "folder").glob("*.json"))) == 2


@pytest.mark.fault(
    "a second SIGTERM while a rank does not finish its step",
    "the job ends at once, exit code not 0",
    within=5,
)
def test_a_second_signal(fit_job):
    ended = fit_job("signalled.py", "twice")
    assert ended.returncode not in (0, PREEMPTED_EXIT_CODE)
    assert "keras_dist: SIGTERM again: this rank ends now." in ended.stdout
