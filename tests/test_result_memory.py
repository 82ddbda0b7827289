"""Memory of results is used again only when nobody holds them."""

import ml_dtypes
import numpy as np
import pytest

from keras_dist._engine.result_memory import ResultMemory

FLOAT = np.dtype(np.float32)


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_after_the_result_is_dropped():
    memory = ResultMemory(1000, FLOAT)
    first = address(memory.take())
    assert address(memory.take()) == first


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
