"""`keras_dist.elastic`: a state survives the loss of ranks, in place and after a restart."""

import pytest
from endings import end_of


@pytest.mark.fault(
    "a rank is killed in a function of `elastic.run`, under Open MPI's ULFM",
    "the remaining ranks finish the step, are notified at the next commit, and continue with "
    "equal state",
    within=20,
)
def test_an_elastic_training_goes_on(ulfm_job):
    ulfm_job(3, "elastic_states.py", "without_a_rank").succeeded()


@pytest.mark.fault(
    "the newest file of an elastic state is damaged; then all are",
    "training resumes from the previous one, with a warning; then an error on every rank",
    within=30,
)
@pytest.mark.fault(
    "the disk is full while an elastic state is committed, then its directory is removed",
    "training continues with a warning each time; earlier files stay, and no partial file is left",
    within=30,
)
def test_disks_that_fail(job, tmp_path):
    # A file size limit fails writes as a full disk does, and needs no privileges.
    printed = job(2, "elastic_states.py", "on_disks_that_fail", tmp_path / "states").succeeded()
    assert printed.count("a checkpoint is damaged: ") == 1
    lines = [line for line in printed.splitlines() if "Training continues" in line]
    assert ["File too large" in line for line in lines] == [True, True, False]


def test_a_restart_takes_the_hosts_that_there_are_then(launch, tmp_path):
    answers, script = tmp_path / "answers", tmp_path / "hosts.sh"
    answers.write_text("localhost:1\nlocalhost:2\n")
    # Each run prints the next line.
    script.write_text('#!/bin/sh\nhead -n 1 "$1" && sed -i 1d "$1"\n')
    script.chmod(0o755)
    asks = ["--host-discovery-script", f"{script} {answers}", "--min-np", 1, "--max-np", 4]
    words = "elastic_states.py", "restarted", tmp_path / "state"
    job = launch("--max-restarts", 1, *asks, *words)
    printed = end_of(job, tmp_path)
    assert job.returncode == 0
    assert printed.count("RuntimeError: no more") == 1


@pytest.mark.fault(
    "a rank is killed in a function of `elastic.run`, under `keras-dist run --max-restarts`",
    "the job restarts, and goes on from the last commit, which is in memory",
    within=30,
)
def test_a_restart_goes_on_from_the_commit_in_memory(launch, tmp_path):
    words = "-np", 2, "--max-restarts", 1, "other_hosts.py", "commits", "dies"
    job = launch(*words, KERAS_DIST_MEMORY_DIRECTORY=str(tmp_path))
    printed = end_of(job, tmp_path)
    assert job.returncode == 0
    assert "Restart 1 of 1" in printed and "sizes 2" in printed
