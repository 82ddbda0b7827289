"""Faults while buckets of gradients are on their way and others are computed, on two nodes."""

import re

import pytest

OVERLAPS = {"MPIR_CVAR_NUM_CLIQUES": "2", "KERAS_DIST_BUCKET_NBYTES": "1"}
ENDS = "the job ends with its traceback, exit code not 0"

# Four buckets. `at_bucket(number)` is called in the second step, before a bucket is queued.
TRAINING = """
import signal, time, keras, numpy as np, keras_dist
from keras_dist._engine import FusedAllreduce
keras_dist.init()
rank = keras_dist.rank()
def at_bucket(number): pass
steps, queue = [], FusedAllreduce.queue_bucket
def queue_bucket(self, number, *arguments):
    steps.extend([number] * (number == 0))
    if len(steps) == 2:
        at_bucket(number)
    return queue(self, number, *arguments)
FusedAllreduce.queue_bucket = queue_bucket
def fit(width=4):
    layers = [keras.layers.Dense(width), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    x, y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
"""


@pytest.fixture(params=["tensorflow", "jax"])
def overlapping_job(request, job):
    """`job` with two ranks on two nodes, on each backend whose steps are compiled."""
    return lambda text, **variables: job(
        2, TRAINING + text, KERAS_BACKEND=request.param, **OVERLAPS, **variables
    )


@pytest.mark.fault("a rank raises between two buckets of a step that overlaps", ENDS, within=5)
def test_a_rank_raises_between_two_buckets(overlapping_job):
    ended = overlapping_job("""
def at_bucket(number):
    if rank == 1 and number == 2:
        fault()
        raise MemoryError("broken on purpose")
fit()
""")
    assert ended.returncode != 0
    told = [line for line in ended.stdout.splitlines() if "broken on purpose" in line]
    # TensorFlow may log the error as well, before the traceback and without the rank.
    assert told and told[-1].startswith("[1] "), ended.stdout
    assert not any(line.startswith("[0] ") for line in told), ended.stdout


@pytest.mark.fault(
    "a rank is killed between two buckets of a step that overlaps",
    "all ranks end, exit code not 0",
    within=5,
)
def test_a_rank_is_killed_between_two_buckets(overlapping_job):
    ended = overlapping_job("""
def at_bucket(number):
    if rank == 1 and number == 2:
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
fit()
""")
    assert ended.returncode != 0


@pytest.mark.fault(
    "a rank trains another model in steps that overlap",
    "an error on every rank that names the rank, what differs and the remedy",
    within=10,
)
def test_another_model(overlapping_job):
    ended = overlapping_job("fault()\nfit(width=4 + rank)\n")
    assert ended.returncode != 0
    for rank in range(2):
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert any("Build the same model, with the same optimizer" in s for s in lines), lines


@pytest.mark.fault(
    "a rank does not queue the next bucket of a step that overlaps",
    "after `KERAS_DIST_STALL_SECONDS` (here 1) it is named, with its stack; at the limit (here 3) "
    "the job ends",
    within=15,
)
def test_a_rank_does_not_queue_the_next_bucket(overlapping_job):
    text = """
def at_bucket(number):
    if rank == 1 and number == 2:
        fault()
        time.sleep(1000)
fit()
"""
    periods = {"KERAS_DIST_STALL_SECONDS": "1", "KERAS_DIST_STALL_ABORT_SECONDS": "3"}
    ended = overlapping_job(text, **periods)
    assert ended.returncode != 0
    assert re.search(r"has waited \d+ s for rank 1 in the reduction of gradients", ended.stdout)
    assert "in at_bucket" in ended.stdout
