"""Memory of results is used again only when nobody holds them."""

import ml_dtypes
import numpy as np
import pytest

from keras_dist._engine import memory as result_memory
from keras_dist._engine.memory import ResultMemory, ResultPool

FLOAT = np.dtype(np.float32)
# A thread that reads the stacks of others at the moment, such as a watchdog that another test has
# left, holds the result of a call: frames refer to their variables.
TRIES = 5


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_after_the_result_is_dropped():
    memory = ResultMemory(1000, FLOAT)
    assert any(address(memory.take()) == address(memory.take()) for _ in range(TRIES))


@pytest.mark.parametrize(
    "hold",
    [
        lambda result: result,
        lambda result: result[3:5].reshape(2, 1),
        lambda result: result.view(np.uint8),
        lambda result: memoryview(result),
        lambda result: np.asarray(memoryview(result)[10:]),
        lambda result: result[:0],
    ],
    ids=["array", "view", "bytes", "memoryview", "array of a memoryview", "empty view"],
)
def test_memory_of_a_result_that_is_held_stays(hold):
    memory = ResultMemory(1000, FLOAT)
    result = memory.take()
    result[:] = 1
    place, kept = address(result), hold(result)
    del result
    assert address(memory.take()) != place
    assert np.asarray(kept).view(np.uint8).size >= 0
    del kept
    assert address(memory.take()) != place  # the newer memory is kept


@pytest.mark.parametrize("dtype", [np.float64, np.bool_, ml_dtypes.bfloat16, np.complex128])
def test_results_are_flat_aligned_and_writable(dtype):
    memory = ResultMemory(17, np.dtype(dtype))
    result = memory.take()
    assert result.shape == (17,) and result.dtype == dtype and result.flags.writeable
    assert address(result) % 64 == 0 and not result.view(np.uint8).any()


def test_results_that_are_held_have_memory_of_their_own():
    pool = ResultPool()
    held = [pool.take(1000) for _ in range(9)]
    assert len({address(array) for array in held}) == 9
    assert all(array.nbytes == 1000 and address(array) % 64 == 0 for array in held)
    held[-1][:] = 7
    part = held[-1][10:].view(np.int16)
    del held
    assert address(pool.take(1000)) != address(part) - 10
    assert (part.view(np.uint8) == 7).all()


def test_results_in_turn_use_the_same_memory():
    def places():
        pool, seen = ResultPool(), set()
        first, second = pool.take(5000), pool.take(4999)
        for _ in range(10):
            first, second = pool.take(5000), first
            seen.add(address(first))
        assert second is not None
        return len(seen)

    # Ten where no memory is used again, and one more than three for each that a thread holds.
    assert min(places() for _ in range(TRIES)) <= 7


@pytest.mark.parametrize("limit", [3 * 4096, 0])
def test_the_memory_that_is_kept_is_bounded(monkeypatch, limit):
    monkeypatch.setattr(result_memory, "MAX_POOL_NBYTES", limit)
    pool = ResultPool()
    for nbytes in (4096, 100, 8192, 50_000, 1, 8192):
        array = pool.take(nbytes)
        array[:] = 1
        kept = sum(memory.nbytes for several in pool._by_size.values() for memory in several)
        assert kept <= max(limit, 2**16)
    assert len(pool._by_size) == 1 or limit
