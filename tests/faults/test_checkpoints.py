"""Checkpoints survive a killed writer, a full disk and corrupted bytes."""

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
def test_damaged_backups(fit_job):
    printed = fit_job("backups.py", "damaged").succeeded()
    assert printed.count("a checkpoint is damaged: ") == 2


@pytest.mark.fault(
    "the disk is full while a backup and checkpoints are written",
    "training continues with a warning each time; earlier files stay, and no partial file is left",
    within=60,
)
def test_no_room(fit_job):
    # A file size limit fails writes as a full disk does, and needs no privileges.
    printed = fit_job("backups.py", "no_room").succeeded()
    lines = [line for line in printed.splitlines() if "Training continues" in line]
    # Two epochs without space, with four writes each.
    assert len(lines) == 8 and all("File too large" in line for line in lines)


@pytest.mark.fault(
    "the directory of backups is removed while training, then a file takes its place",
    "it is created again; then training continues without backups, with a warning",
    within=60,
)
def test_the_directory_goes_away(fit_job):
    printed = fit_job("backups.py", "directory_goes_away").succeeded()
    assert printed.count("Training continues, and earlier files are unchanged") == 1
    assert "FileExistsError" in printed
