"""Results that are read in shared memory and held, in whatever way: none changes."""

import gc

import numpy as np
import pytest

import keras_dist
from keras_dist import _engine, runtime

pytestmark = pytest.mark.jobs("engine")

LARGE = 70_000  # float32: results of this size are read in shared memory


def shared_memory():
    """Begins with new memory: a row of another test may have been written to."""
    comm = runtime.communicator()
    if keras_dist.size() == 1 or comm.node is None:
        pytest.skip("the ranks share no memory")
    comm.regions.clear()
    keras_dist.barrier()


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
    "array": lambda array: array,
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
