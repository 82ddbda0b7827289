"""Faults of operations in GPU memory, over the test double of NCCL; see `gpu_double`."""

import re
from pathlib import Path

import pytest
from start_jobs import allowed

DOUBLE = {"_KERAS_DIST_GPU_DOUBLE": str(Path(__file__).parents[1] / "gpu_double.py")}
LIMITS = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}


@pytest.mark.fault(
    "a rank is killed while others wait on the GPU (test double of NCCL)",
    "the wait on the GPU ends with `RankLostError`, exit code not 0",
    within=5,
)
def test_a_killed_rank(ulfm_job):
    # Other mpiexec would end the other ranks before they notice.
    printed = ulfm_job(3, "on_gpus.py", "steps", GPU_DOUBLE="die-in-5", **DOUBLE).failed()
    for rank in (0, 2):
        assert f"RankLostError: [rank {rank} of 3] Expected all ranks to come" in printed


@pytest.mark.fault(
    "an operation on the GPU does not end (test double of NCCL)",
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named; at the limit (here 3) the job ends",
    within=15,
)
def test_an_operation_that_does_not_end(job):
    how = {"GPU_DOUBLE": "stuck-in-5", **LIMITS, **DOUBLE}
    printed = job(2, "on_gpus.py", "steps", **how).failed()
    # On a busy machine one rank may be told of before the other has come as far.
    waited = r"ha(s|ve) waited \d+ s for data of each other in allreduce\('gradients'\)\."
    assert re.search(waited, printed)
    assert "The job ends now: the limit is 3 s" in printed


@pytest.mark.fault(
    "a rank is killed while others wait on the GPU, with `on_failure=continue` (test double)",
    "the step is reduced again by a new communicator; no step is lost, exit code 0",
    within=20,
)
def test_ranks_continue(go_on):
    printed = go_on(3, "on_gpus.py", "steps", GPU_DOUBLE="die-in-5", **DOUBLE).succeeded()
    assert f"sums {[7] * 4 + [5] * 8}" in printed
    assert "keras_dist: rank 1 has died. 2 of 3 ranks continue" in printed


@pytest.mark.short
@pytest.mark.fault(
    "a rank fails between the agreement and the launch on the GPU (test double of NCCL)",
    "`RankError` with the text of that rank on every rank, exit code not 0",
    within=5,
)
@pytest.mark.parametrize("fault", ["fail-in-5", "fail-in-init"])
def test_a_failed_launch(job, fault):
    printed = job(3, "on_gpus.py", "steps_after_errors", GPU_DOUBLE=fault, **DOUBLE).failed()
    text = "RankError [rank 1 of 3] Expected every rank to launch allreduce('gradients')"
    for rank in range(3):
        assert f"rank {rank} raises {text}" in printed
    assert f"sums {[7] * 12}" in printed


def test_a_rank_that_dies_after_a_failed_launch(ulfm_job):
    ended = ulfm_job(3, "on_gpus.py", "die_later", GPU_DOUBLE="fail-in-5", **DOUBLE)
    assert ended.returncode != 0
    assert ended.seconds < allowed(5)
    for rank in (0, 2):
        assert f"RankLostError: [rank {rank} of 3] Expected all ranks to " in ended.stdout


# --- The same faults in fit, on the backend that starts fastest. In tests/ranks, errors of a launch
# pass through the steps of the other two.

slow = pytest.mark.slow


def in_fit(start, ranks, fault):
    """Starts ranks that train, with a fault of the test double in the fifth operation."""
    how = {"KERAS_BACKEND": "jax", "GPU_DOUBLE": f"{fault}-in-5", **DOUBLE}
    return start(ranks, "fit_faults.py", "on_gpus", **how)


@slow
def test_a_failed_launch_in_fit(job):
    ended = in_fit(job, 2, "fail")
    assert ended.returncode != 0
    assert ended.seconds < allowed(30)
    for rank in range(2):
        assert f"rank {rank} of 2 raises" in ended.stdout
    raised = [line for line in ended.stdout.splitlines() if " raises " in line]
    assert all("[rank 1 of 2] Expected every rank to launch" in line for line in raised), raised


@slow
def test_ranks_continue_in_fit(go_on):
    printed = in_fit(go_on, 3, "die").succeeded()
    assert "2 of 3 ranks continue" in printed
    [trained] = {line for line in printed.splitlines() if line.startswith("trained")}
    first, second = trained.removeprefix("trained ").strip("[]").split(", ")
    assert first == second
