"""JAX arrays as arrays for the engine: in place, on the host or in GPU memory.

The engine writes to new arrays, and to those that a program has made for it: others are immutable,
and a gradient may share its memory with a weight. JAX does not tell its stream. But it makes a
given stream wait for an array, and an array that it takes over wait for a given stream, as the
protocol of DLPack has it, so that the host need not wait.
"""

import math
from typing import Any

import jax
import numpy as np

from keras_dist._backends.jax_devices import number_of_gpu
from keras_dist._gpu import DeviceArray, counts_host_memory, load_runtime

__all__ = ["gpu_number", "place_of", "to_array", "to_jax"]

STREAM_ORDERED = True  # otherwise the host waits


def gpu_number() -> int | None:
    """Returns the number of the GPU of this process. See `Backend.gpu_number`."""
    return 0 if counts_host_memory() else number_of_gpu()


def to_array(array: Any, is_own: bool = False) -> np.ndarray | DeviceArray:
    """Returns an array of JAX as an array of the engine, without a copy.

    Args:
        array: the array.
        is_own: whether nobody else uses it, so that the engine may write to it.
    """
    if not _is_on_device(array):
        return np.asarray(array)
    return _device_array(array, is_own)


def place_of(array: Any) -> Any:
    """Returns where a result belongs that replaces an array; `None` leaves it to JAX.

    A result is committed to a device only if the array is. Otherwise the second step would receive
    committed weights and be compiled again.
    """
    return array.sharding if array.committed else None


def to_jax(result: np.ndarray | DeviceArray, place: Any) -> Any:
    """Returns an array of the engine as an array of JAX, without a copy; see `place_of`.

    Later work of JAX waits until an array in GPU memory has been written.
    """
    if not isinstance(result, DeviceArray):
        return jax.device_put(result, place, may_alias=True)
    if result.completion is None or not _orders_streams(result.owner):
        return result.finish(None)
    return jax.dlpack.from_dlpack(_Written(result), device=place)


class _Written:
    """An array that an operation of the engine writes, for JAX to take over.

    Args:
        result: the array.
    """

    def __init__(self, result: DeviceArray):
        self._result = result

    def __dlpack_device__(self) -> Any:
        return self._result.owner.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        return self._result.finish(stream).__dlpack__(stream=stream)


def _is_on_device(array: Any) -> bool:
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) > 1:
        return False
    (device,) = array.sharding.device_set
    return counts_host_memory() or (device.platform != "cpu" and load_runtime() is not None)


def _device_array(array: Any, is_own: bool = False) -> DeviceArray:
    def allocate(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        place = place_of(array)
        return _device_array(jax.numpy.zeros(shape, dtype, device=place))

    def hold(stream: int) -> None:
        array.__dlpack__(stream=stream)

    orders = _orders_streams(array)
    if not orders:
        array.block_until_ready()
    address = array.unsafe_buffer_pointer() if math.prod(array.shape) else 0
    return DeviceArray(
        address,
        array.shape,
        np.dtype(array.dtype),
        array,
        allocate,
        hold=hold if orders else None,
        is_own=is_own,
    )


def _orders_streams(array: Any) -> bool:
    """Returns whether JAX orders its work and that of other streams; otherwise the host waits."""
    is_known = jax.dlpack.is_supported_dtype(array.dtype)
    return STREAM_ORDERED and is_known and not counts_host_memory()
