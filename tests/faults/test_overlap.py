"""Faults while buckets of gradients are on their way and others are computed, on two nodes."""

import re

import pytest

OVERLAPS = {"MPIR_CVAR_NUM_CLIQUES": "2", "KERAS_DIST_BUCKET_NBYTES": "1"}
ENDS = "the job ends with its traceback, exit code not 0"


@pytest.fixture
def overlapping_job(job):
    """`job` with two ranks on two nodes, without a framework unless a backend is named."""
    return lambda action, **variables: job(2, "buckets.py", action, **OVERLAPS, **variables)


@pytest.mark.fault("a rank raises between two buckets of a step that overlaps", ENDS, within=5)
@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.slow), "jax"])
def test_a_rank_raises_between_two_buckets(overlapping_job, backend):
    # An error passes through the step that the backend has compiled; other faults do not.
    printed = overlapping_job("raise", KERAS_BACKEND=backend).failed()
    told = [line for line in printed.splitlines() if "broken on purpose" in line]
    # TensorFlow may log the error as well, before the traceback and without the rank.
    assert told and told[-1].startswith("[1] ")
    assert not any(line.startswith("[0] ") for line in told)


@pytest.mark.fault(
    "a rank is killed between two buckets of a step that overlaps",
    "all ranks end, exit code not 0",
    within=5,
)
def test_a_rank_is_killed_between_two_buckets(overlapping_job):
    overlapping_job("die").failed()


@pytest.mark.fault(
    "a rank trains another model in steps that overlap",
    "an error on every rank that names the rank, what differs and the remedy",
    within=10,
)
def test_another_model(overlapping_job):
    printed = overlapping_job("train another model", KERAS_BACKEND="jax").failed()
    for rank in range(2):
        lines = [line for line in printed.splitlines() if line.startswith(f"[{rank}] ")]
        assert any("Build the same model, with the same optimizer" in s for s in lines), lines


@pytest.mark.fault(
    "a rank does not queue the next bucket of a step that overlaps",
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named, with its stack; at the limit (here 3) "
    "the job ends",
    within=15,
)
def test_a_rank_does_not_queue_the_next_bucket(overlapping_job):
    periods = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}
    printed = overlapping_job("stay away", **periods).failed()
    assert re.search(r"has waited \d+ s for rank 1 in the reduction of gradients", printed)
    assert "in at_bucket" in printed
