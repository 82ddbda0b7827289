"""Backups and checkpoints survive a killed writer, full disks and damage; replicas that differ."""

import pytest


@pytest.mark.fault(
    "the writer of backups is killed, 40 times at random moments",
    "the newest or the previous backup is intact, and a restart uses it",
    within=60,
)
def test_the_writer_is_killed(job, tmp_path):
    job(1, "killed_writers.py", "backups", FOLDER=tmp_path / "backups").succeeded()


@pytest.mark.short
@pytest.mark.fault(
    "the newest backup is damaged or truncated; then all are",
    "training resumes from the previous one, with a warning; then an error on every rank",
    within=60,
)
@pytest.mark.fault(
    "the disk is full while a backup and checkpoints are written",
    "training continues with a warning each time; earlier files stay, and no partial file is left",
    within=60,
)
@pytest.mark.fault(
    "the directory of backups is removed while training, then a file takes its place",
    "it is created again; then training continues without backups, with a warning",
    within=60,
)
@pytest.mark.fault(
    "the weights of one rank differ, at the end of a fit or before a checkpoint",
    "an error on every rank that names variables and ranks; nothing is written",
    within=60,
)
def test_disks_that_fail_and_replicas_that_diverge(fit_job):
    printed = fit_job("backups.py").succeeded()
    assert printed.count("a checkpoint is damaged: ") == 2
    lines = [line for line in printed.splitlines() if "Training continues" in line]
    # Two epochs without space, with four writes each; then one without a directory.
    assert len(lines) == 9 and all("File too large" in line for line in lines[:8])
    assert "Training continues, and earlier files are unchanged" in lines[8]
    assert "FileExistsError" in lines[8]
