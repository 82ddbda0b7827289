"""Checkpoints of all ranks survive killed writers, full disks, stale handles and damage."""

import pytest


@pytest.mark.fault(
    "processes that write parts of a sharded checkpoint, without MPI, are killed, 40 times before "
    "a random call of the file system",
    "the newest generation with a manifest is whole, and none older than the last one",
    within=60,
)
def test_writers_are_killed(job, tmp_path):
    job(1, "killed_writers.py", "parts", FOLDER=tmp_path / "checkpoints").succeeded()


@pytest.mark.fault(
    "the disk of one rank is full while a sharded checkpoint is written; then its file handle, and "
    "that of the manifest, is stale",
    "training continues; the root names rank and file once each time, and earlier generations stay",
    within=60,
)
@pytest.mark.fault(
    "a part of the newest generation of a sharded checkpoint has other bytes; then all have",
    "training resumes from the generation before, and the root names file and digests; then an "
    "error on every rank",
    within=60,
)
def test_disks_that_fail(fit_job):
    # A file size limit fails writes as a full disk does, and needs no privileges.
    printed = fit_job("sharded_checkpoints.py", "on_disks_that_fail").succeeded()
    lines = [line for line in printed.splitlines() if "Training continues" in line]
    for line, words in zip(
        lines,
        (
            ("rank 1 to write its part", "File too large", "room/00000002/"),
            ("rank 1 to write its part", "Stale file handle", "room/00000003/"),
            ("to write the manifest", "Stale file handle", ".json"),
        ),
        strict=True,
    ):
        assert all(word in line for word in ("[rank 0 of 2]", *words)), line
    [line] = [line for line in printed.splitlines() if "a checkpoint is damaged" in line]
    assert "00000002/1-of-2-" in line and "whose SHA-256 is" in line and "00000001-" in line


@pytest.mark.slow
@pytest.mark.fault(
    "the root is killed in the first write of a sharded checkpoint, and the next root behind the "
    "manifest of the second, with `on_failure=continue`",
    "training continues; the next root says that the first generation is lost, the second stays, "
    "and later ones describe the model",
    within=60,
)
def test_roots_die_before_and_behind_the_manifest(go_on, tmp_path):
    where = {"FOLDER": tmp_path / "checkpoints", "KERAS_BACKEND": "jax"}
    printed = go_on(3, "sharded_checkpoints.py", "roots_die", **where).succeeded()
    assert "written by 1" in printed
    [line] = [line for line in printed.splitlines() if "have died during the write" in line]
    assert "[rank 0 of 2]" in line and "Training continues" in line
