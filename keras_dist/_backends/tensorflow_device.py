"""TensorFlow tensors as arrays for the engine, by DLPack, in an operation that stays on the GPU.

`tf.py_function` calls Python with eager tensors where they are, from a graph. TensorFlow does not
tell its stream, so the host waits before and after the engine uses a tensor.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist._gpu import DeviceArray, counts_host_memory, load_runtime, uniform


class _Tensor(ctypes.Structure):
    """DLPack's description of a tensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_pointer_of = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def gpu_number() -> int | None:
    """Returns the number of the visible GPU. See `Backend.gpu_number`."""
    if counts_host_memory():
        return 0
    visible = tf.config.get_visible_devices("GPU")
    return int(visible[0].name.rpartition(":")[2]) if visible else None


@functools.cache  # TensorFlow fixes its devices at first use
def uses_gpu() -> bool:
    """Returns whether tensors of this process may be in GPU memory."""
    if counts_host_memory():
        return True
    return bool(tf.config.get_visible_devices("GPU")) and load_runtime() is not None


def call_on_device(
    function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any], name: str
) -> Any:
    """Adds a call of a function of the engine's arrays to a graph, or calls it eagerly.

    An eager call raises what the function raises, which an operation makes an error of TensorFlow.
    """
    call = functools.partial(_call, function)
    if tf.executing_eagerly():
        return call(*map(tf.convert_to_tensor, tensors))
    return tf.py_function(call, tensors, dtypes, name=name)


def _call(function: Callable[..., Any], *tensors: Any) -> list[Any]:
    results = function(*engine_arrays(tensors))
    each = results if isinstance(results, list | tuple) else [results]
    return [_to_tensor(result) for result in each]


def engine_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors as arrays of the engine. See `Backend.engine_arrays`."""
    _wait_for_gpu()
    return uniform([_to_array(tf.convert_to_tensor(tensor)) for tensor in tensors])


def tensor_of(array: Any, like: Any) -> Any:
    """Returns an array of the engine as a tensor. See `Backend.tensor_of`."""
    return _to_tensor(array)


def _to_array(tensor: Any) -> np.ndarray | DeviceArray:
    on_gpu = counts_host_memory() or (uses_gpu() and "GPU" in tensor.backing_device)
    array: np.ndarray | DeviceArray = _device_array(tensor) if on_gpu else tensor.numpy()
    return array


def _to_tensor(result: np.ndarray | DeviceArray) -> Any:
    if isinstance(result, DeviceArray):
        return result.finish(None)
    return tf.convert_to_tensor(result)


def _wait_for_gpu() -> None:
    """Blocks until TensorFlow's work on the GPU has been done."""
    if uses_gpu() and not counts_host_memory():
        tf.test.experimental.sync_devices()


def _device_array(tensor: Any) -> DeviceArray:
    def allocate(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        with tf.device(tensor.device):
            made = tf.raw_ops.Empty(shape=shape, dtype=tensor.dtype)
        _wait_for_gpu()  # TensorFlow gives memory away before the work on it has been done
        return _device_array(made)

    shape = tuple(tensor.shape)
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    return DeviceArray(_address_of(tensor), shape, dtype, tensor, allocate)


def _address_of(tensor: Any) -> int:
    """Returns the address of a tensor, as DLPack describes it."""
    if tensor.dtype == tf.bool:  # not among the dtypes of DLPack
        tensor = tf.bitcast(tensor, tf.uint8)
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    described = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    return (described.data or 0) + int(described.byte_offset)
