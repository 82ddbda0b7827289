"""Failures of ranks that read for other ranks."""

import numpy as np
import pytest


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


@pytest.mark.parametrize("dies", [0, 2])
def test_the_others_read_all_rows_of_the_next_epoch(go_on, tmp_path, dies):
    np.save(tmp_path / "rows.npy", np.arange(1003))
    variables = {"ROWS": tmp_path / "rows.npy"}
    printed = go_on(3, "reading.py", "without_a_rank", dies, **variables).succeeded()
    assert printed.count("rows 1003 1003") == 2
