"""Calls like earlier ones: their errors, their memory, and their results, which may be held."""

import gc
import importlib
import os

import numpy as np
import pytest

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine.shm import region

pytestmark = pytest.mark.jobs("tensorflow-2")

LARGE = 70_000  # float32: results of this size are read in shared memory


def several():
    if keras_dist.size() == 1:
        pytest.skip("one rank meets nobody")


def shared_memory():
    """Begins with new memory: a row of another test may have been written to."""
    comm = runtime.communicator()
    if keras_dist.size() == 1 or comm.node is None:
        pytest.skip("the ranks share no memory")
    comm.regions.clear()
    keras_dist.barrier()


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
    module = importlib.import_module("keras_dist._engine.collectives.allreduce")
    monkeypatch.setattr(module, "MAX_PLANS", 5)
    shared_memory()
    comm = runtime.communicator()
    for count in range(LARGE, LARGE + 12):
        keras_dist.allreduce(np.ones(count, np.float32), "sum")
    regions = {id(plan.memory.ready_reduction(0).region) for plan in comm.plans.values()}
    assert len(comm.plans) <= 5 and len(comm.fast_calls) <= 5 and len(regions) == 1


def test_regions_stay_within_their_limit(monkeypatch):
    shared_memory()
    comm = runtime.communicator()
    monkeypatch.setattr(region, "MAX_POOL_NBYTES", 2**23)
    for _ in range(2):
        for count in (LARGE, 10 * LARGE, 2 * LARGE, 30 * LARGE, 3, 4 * LARGE):
            result = keras_dist.allreduce(np.ones(count, np.float32), "sum")
            assert (result == keras_dist.size()).all()
    sizes = keras_dist.allgather_object(comm.regions.nbytes)
    # One region may be larger than the limit.
    assert len(set(sizes)) == 1 and sizes[0] <= 2**23 + 5 * 2 * 30 * LARGE * 4


# --- Results that are held, in whatever way: none changes


def is_lent(array):
    """Returns whether an array lies in shared memory."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as lines:
        for line in lines:
            low, high = (int(end, 16) for end in line.split(" ", 1)[0].split("-"))
            if low <= address < high:
                return "/dev/shm" in line
    return False


def total(number):
    size = keras_dist.size()
    return size * (size - 1) / 2 + size * number


def reduced(count, number, **options):
    return keras_dist.allreduce(
        np.full(count, keras_dist.rank() + number, np.float32), "sum", **options
    )


def of_torch(array):
    return pytest.importorskip("torch").from_dlpack(array)[1:]


HOLDS = {
    "view of a view": lambda array: array[7:].reshape(1, -1)[:, 5:].T,
    "bytes": lambda array: array.view(np.uint8)[4:],
    "memoryview": lambda array: memoryview(array)[3:],
    "object that exports a buffer": lambda array: np.frombuffer(memoryview(array), np.float32),
    "torch tensor": of_torch,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_results_that_are_held_stay_and_later_ones_are_lent_again(hold):
    shared_memory()
    keeps = keras_dist.rank() == keras_dist.size() - 1
    for _ in range(2):
        held = []
        for number in range(9):
            result = hold(reduced(LARGE, number))
            held += [result] if keeps else []
        del result
        for number, kept in enumerate(held):
            raw = np.ascontiguousarray(kept).view(np.uint8)
            assert (raw[..., -4:].copy().view(np.float32) == total(number)).all()
        held.clear()
        gc.collect()
        keras_dist.barrier()
        reduced(LARGE, 1)  # at its rendezvous, all ranks learn that nothing is held
        lent = keras_dist.allgather_object(is_lent(reduced(LARGE, 2)))
        assert lent == [True] * keras_dist.size()


def test_as_many_results_as_there_are_rows_are_held():
    shared_memory()
    held = [reduced(LARGE, number) for number in range(12)]
    lent = [is_lent(array) for array in held]
    assert lent == sorted(lent, reverse=True) and any(lent) and not all(lent)
    for number, array in enumerate(held):
        assert (array == total(number)).all()
    # While rows are short, results go into memory of the script as well.
    out = np.empty(LARGE, np.float32)
    assert reduced(LARGE, 5, out=out) is out and (out == total(5)).all()
    several = keras_dist.grouped_allreduce([out, out[:3], np.ones(LARGE, np.float32)], "sum")
    assert (several[0] == total(5) * keras_dist.size()).all()
    assert (several[2] == keras_dist.size()).all()
    for number, array in enumerate(held):
        assert (array == total(number)).all()


def test_gathered_arrays_that_are_held_stay_as_they_are():
    shared_memory()
    comm = runtime.communicator()
    plan = _engine.FusedAllgather(
        comm, ["a"], [((LARGE,), np.dtype("f4"))], "gathering", "Look.", lambda: comm
    )
    mine = plan.part(0, comm.rank)

    def gathered(number):
        [whole] = plan([np.full(mine.stop - mine.start, number, np.float32)])
        return whole

    held = [gathered(number) for number in range(6)]  # more than there are rows of results
    assert [set(whole.tolist()) for whole in held] == [{float(number)} for number in range(6)]
    assert is_lent(held[0]) and not is_lent(held[-1])
    del held
    gathered(6)  # the ranks tell each other that rows are free
    assert is_lent(gathered(7)) and set(gathered(8).tolist()) == {8.0}
