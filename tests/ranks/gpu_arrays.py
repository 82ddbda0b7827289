"""Arrays in the memory of the double's GPU, and what both ways of an operation return."""

import math
import sys

import numpy as np

from keras_dist import _gpu, runtime


def on_gpu(array, joiner=None):
    """Returns an array in the memory of the double's GPU."""
    array = np.ascontiguousarray(array)

    def allocate(shape, dtype):
        return on_gpu(np.full(shape, 77, dtype), joiner)

    address = array.ctypes.data
    return _gpu.DeviceArray(
        address, array.shape, array.dtype, array, allocate, stream=lambda: 0, joiner=joiner
    )


def join(arrays, offsets, count):
    flat = np.full(count, 77, arrays[0].dtype)
    for array, offset in zip(arrays, offsets, strict=True):
        flat[offset : offset + array.count] = array.owner.reshape(-1)
    return on_gpu(flat, JOINER)


def part(flat, offset, shape):
    return on_gpu(flat.owner[offset : offset + math.prod(shape)].reshape(shape), JOINER)


JOINER = _gpu.Concatenation(join, part)  # as that of a framework


def values(arrays):
    return [array.finish(0) for array in arrays]


def launches():
    return sys.modules["keras_dist_gpu_double"].launches


def contribution(dtype, shape=(3, 5)):
    """Returns small numbers of this rank, which every dtype holds exactly."""
    generator = np.random.default_rng(runtime.rank())
    return generator.integers(0, 3, shape).astype(dtype)


def both_ways(operation, arrays, *args):
    """Returns the results of an operation in GPU memory and on the host."""
    comm = runtime.communicator()
    names = [f"array {index}" for index in range(len(arrays))]
    here = values(operation(comm, [on_gpu(array) for array in arrays], names, *args))
    return here, operation(comm, arrays, names, *args)


def assert_same(results):
    here, host = results
    for ours, theirs in zip(here, host, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()
