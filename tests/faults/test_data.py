"""Failures of ranks that read for others, and cached copies that other users made or changed."""

import os

import numpy as np
import pytest

from keras_dist.storage.ownership import private_name

STRANGER = 54321  # as in reading.py


def use(job, tmp_path, damage):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "1").write_text("one")
    places = {"SOURCE": str(tmp_path / "tree"), "CACHE": str(tmp_path / "cache")}
    return job(2, "reading.py", "changed_copy", damage, **places)


@pytest.mark.fault(
    "a copy of `data.cached` belongs to another user, or is a link",
    "an error on every rank that names the owner",
    within=10,
)
@pytest.mark.parametrize("what", ["a link", "of another user"])
def test_what_is_in_the_cache_is_not_ones_own(job, tmp_path, what):
    if what == "of another user" and os.getuid() != 0:
        pytest.skip("NOT TESTED: files of another user; only root can make them")
    whose = "one of user " if what == "a link" else f"one of user uid {STRANGER}, mode -rw"
    ended = use(job, tmp_path, what)
    assert ended.returncode != 0
    for rank in range(2):
        words = f"[{rank}] keras_dist.errors.DataError: [rank 0 of 2] on {os.uname().nodename}"
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith(words)]
        assert whose in line and f"remove {tmp_path / 'cache' / private_name()}" in line


@pytest.mark.fault(
    "a copy of `data.cached` is changed by another program",
    "it is copied again, with a warning",
    within=10,
)
def test_what_is_in_the_cache_has_changed(job, tmp_path):
    printed = use(job, tmp_path, "changed").succeeded()
    assert printed.count("turn 1: one") == 2
    assert "has changed since it was copied" in printed


# --- Ranks that read for others


@pytest.mark.fault(
    "a rank that reads for others blocks in its file system",
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named; at the limit (here 3) the job ends",
    within=15,
)
def test_a_rank_that_reads_for_others_is_stuck(job, tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(1003))
    limits = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}
    printed = job(2, "reading.py", "blocked", ROWS=tmp_path / "rows.npy", **limits).failed()
    assert "keras_dist: rank 1 of 2 has waited" in printed
    assert "for rank 0 in alltoall('reading rows of files')" in printed
    assert "The job ends now: the limit is 3 s" in printed


def test_the_others_read_all_rows_of_the_next_epoch(go_on, tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(1003))
    variables = {"ROWS": tmp_path / "rows.npy"}
    printed = go_on(4, "reading.py", "without_two_ranks", **variables).succeeded()
    assert printed.count("rows 1003 1003") == 3 + 2
