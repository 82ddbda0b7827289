"""Calls like earlier ones: their errors and their memory."""

import os

import numpy as np
import pytest

import keras_dist
from keras_dist import errors, runtime
from keras_dist._engine.shm import region

pytestmark = pytest.mark.jobs("engine")

LARGE = 70_000  # float32: results of this size are read in shared memory


def several():
    if keras_dist.size() == 1:
        pytest.skip("one rank meets nobody")


def last_rank():
    return keras_dist.rank() == keras_dist.size() - 1


def test_a_repeated_list_that_differs_is_an_error_on_every_rank():
    several()
    mine, other = [np.ones(LARGE), np.ones(3)], [np.ones(LARGE), np.ones(4)]
    for given in (mine, other, mine, other):
        keras_dist.grouped_allreduce(given, "sum")
    for _ in range(2):
        with pytest.raises(errors.MismatchError, match=r"shape \(\d+,\)"):
            keras_dist.grouped_allreduce(other if last_rank() else mine, "sum")
        for given in (mine, other):
            for array in keras_dist.grouped_allreduce(given, "sum"):
                assert (array == keras_dist.size()).all()


def test_infinities_and_overflow_are_silent(recwarn):
    mine = np.array([np.inf if keras_dist.rank() else -np.inf, 3e38], np.float32)
    for _ in range(3):
        keras_dist.allreduce(mine, "sum")
    assert not recwarn.list


def test_a_forked_child_keeps_the_result_that_its_parent_drops():
    several()
    mine = np.ones(LARGE + 2, np.float32)
    result, size = keras_dist.allreduce(mine, "sum"), keras_dist.size()
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(ready[0], 1)
            os.write(done[1], b"y" if (result == size).all() else b"n")
        finally:  # the child is no rank and runs no tests
            os._exit(0)
    del result
    for number in range(6):
        keras_dist.allreduce(mine + number, "sum")
    os.write(ready[1], b".")
    answer = os.read(done[0], 1)
    os.waitpid(pid, 0)
    for end in (*ready, *done):
        os.close(end)
    assert keras_dist.allgather_object(answer) == [b"y"] * keras_dist.size()


@pytest.mark.parametrize("count", [3, LARGE])
def test_an_out_that_does_not_fit_is_an_error_on_every_rank(count):
    mine = np.ones(count, np.float32)
    read_only = mine.copy()
    read_only.flags.writeable = False
    wrong = [np.ones(count + 1, np.float32), np.ones(count), read_only, [0.0] * count]
    keras_dist.allreduce(mine, "sum")
    for out in wrong:
        with pytest.raises(errors.KerasDistError, match="out to"):
            keras_dist.allreduce(mine, "sum", out=out if last_rank() else None)
        assert (keras_dist.allreduce(mine, "sum") == keras_dist.size()).all()


def test_shapes_share_memory_and_their_number_is_bounded(monkeypatch):
    several()
    module = __import__("importlib").import_module("keras_dist._engine.collectives.allreduce")
    monkeypatch.setattr(module, "MAX_PLANS", 5)
    comm = runtime.communicator()
    if comm.node is None:
        pytest.skip("the ranks share no memory")
    for count in range(LARGE, LARGE + 12):
        keras_dist.allreduce(np.ones(count, np.float32), "sum")
    regions = {id(plan.memory.ready_reduction(0).region) for plan in comm.plans.values()}
    assert len(comm.plans) <= 5 and len(comm.fast_calls) <= 5 and len(regions) == 1


def test_regions_stay_within_their_limit(monkeypatch):
    several()
    comm = runtime.communicator(keras_dist.global_process_set)
    if comm.node is None:
        pytest.skip("the ranks share no memory")
    monkeypatch.setattr(region, "MAX_POOL_NBYTES", 2**23)
    for _ in range(2):
        for count in (LARGE, 10 * LARGE, 2 * LARGE, 30 * LARGE, 3, 4 * LARGE):
            result = keras_dist.allreduce(np.ones(count, np.float32), "sum")
            assert (result == keras_dist.size()).all()
    sizes = keras_dist.allgather_object(comm.regions.nbytes)
    # One region may be larger than the limit.
    assert len(set(sizes)) == 1 and sizes[0] <= 2**23 + 5 * 2 * 30 * LARGE * 4
