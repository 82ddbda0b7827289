"""JAX arrays as arrays for the engine: in place, on the host or in GPU memory.

The engine writes to new arrays only: those of JAX are immutable, and a gradient may share its
memory with a weight. JAX does not tell the stream of an array. Its DLPack protocol takes a stream,
but not every GPU client of XLA orders its work after that stream. So the host waits for an array
before the engine uses it, and until it has been written before JAX does.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_dist._backends.jax_devices import number_of_gpu
from keras_dist._gpu import DeviceArray, counts_host_memory, load_runtime, uniform


def gpu_number() -> int | None:
    """Returns the number of the GPU of this process. See `Backend.gpu_number`."""
    return 0 if counts_host_memory() else number_of_gpu()


def to_array(array: Any) -> np.ndarray | DeviceArray:
    """Returns an array of JAX as an array of the engine, without a copy."""
    if not _is_on_device(array):
        return np.asarray(array)
    return _device_array(array)


def place_of(array: Any) -> Any:
    """Returns where a result belongs that replaces an array; `None` leaves it to JAX.

    A result is committed to a device only if the array is. Otherwise the second step would receive
    committed weights and be compiled again.
    """
    return array.sharding if array.committed else None


def to_jax(result: np.ndarray | DeviceArray, place: Any) -> Any:
    """Returns an array of the engine as an array of JAX, without a copy; see `place_of`."""
    if isinstance(result, DeviceArray):
        return result.finish(None)
    return jax.device_put(result, place, may_alias=True)


def _is_on_device(array: Any) -> bool:
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) > 1:
        return False
    (device,) = array.sharding.device_set
    return counts_host_memory() or (device.platform != "cpu" and load_runtime() is not None)


def _device_array(array: Any) -> DeviceArray:
    def allocate(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        place = place_of(array)
        return _device_array(jax.numpy.zeros(shape, dtype, device=place))

    array.block_until_ready()
    address = array.unsafe_buffer_pointer() if math.prod(array.shape) else 0
    return DeviceArray(address, array.shape, np.dtype(array.dtype), array, allocate)


def engine_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors as arrays of the engine. See `Backend.engine_arrays`."""
    return uniform([to_array(tensor) for tensor in tensors])


def tensor_of(array: Any, like: Any) -> Any:
    """Returns an array of the engine as a tensor. See `Backend.tensor_of`."""
    return array if isinstance(array, np.ndarray) else to_jax(array, place_of(like))
