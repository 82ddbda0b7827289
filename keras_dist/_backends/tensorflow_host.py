"""Host functions of arrays as operations of a TensorFlow graph, by `tf.numpy_function`.

Conversion of an array to a tensor takes a graph several times as long as a split of a tensor. So
results that are adjacent in memory become one tensor, which is split without a copy. TensorFlow may
write to such a slice if it has no other reader, but never to a converted array. So this is only for
results whose memory belongs to the graph: a write to a leased result ends the lease.

To overlap the reduction of gradients, a host operation queues a bucket when its gradients have been
computed, and another one waits for the results. On a GPU, the ranks agree on a bucket and launch it
while the operation of the next one waits for its gradients.

The engine takes tensors in GPU memory where they are, by DLPack, in a `tf.py_function`, which calls
Python with eager tensors. TensorFlow does not tell its stream, so the host waits before and after
the engine uses a tensor.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.lib.stride_tricks import as_strided

from keras_dist._backends.tensorflow_order import NAME, in_order
from keras_dist._compat.tensorflow import is_recorded
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


@functools.cache  # TensorFlow fixes its devices at first use
def uses_gpu() -> bool:
    """Returns whether tensors of this process may be in GPU memory."""
    if counts_host_memory():
        return True
    return bool(tf.config.get_visible_devices("GPU")) and load_runtime() is not None


def call_on_host(
    function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> Any:
    """Adds a call on numpy arrays to a graph, or calls it."""
    if tf.executing_eagerly():
        return tf.numpy_function(function, tensors, dtypes, name=NAME)
    return in_order(tf.numpy_function, function, tensors, dtypes)


def call_on_device(
    function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> Any:
    """Adds a call on the engine's arrays to a graph, or calls it, which raises its own errors."""
    call = functools.partial(_call_on_engine_arrays, function)
    if tf.executing_eagerly():
        return call(*map(tf.convert_to_tensor, tensors))
    return in_order(tf.py_function, call, tensors, dtypes)


def _call_on_engine_arrays(function: Callable[..., Any], *tensors: Any) -> list[Any]:
    results = function(*engine_arrays(tensors))
    each = results if isinstance(results, list | tuple) else [results]
    return [to_tensor(result) for result in each]


def engine_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors as arrays of the engine."""
    _wait_for_gpu()
    return uniform([_to_array(tf.convert_to_tensor(tensor)) for tensor in tensors])


def _to_array(tensor: Any) -> np.ndarray | DeviceArray:
    on_gpu = counts_host_memory() or (uses_gpu() and "GPU" in tensor.backing_device)
    return _device_array(tensor) if on_gpu else tensor.numpy()


def as_array(tensor: Any) -> np.ndarray:
    """Returns an eager tensor as an array, in place on the host."""
    # The array protocol of TensorFlow copies; its buffer protocol does not.
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError):  # as for bfloat16, which is not numpy's
        return np.asarray(tensor.numpy())


def to_tensor(result: np.ndarray | DeviceArray) -> Any:
    """Returns an array of the engine as a tensor."""
    if isinstance(result, DeviceArray):
        return result.finish(None)
    return tf.convert_to_tensor(result)


def _wait_for_gpu() -> None:
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
    if tensor.dtype == tf.bool:  # not among the dtypes of DLPack
        tensor = tf.bitcast(tensor, tf.uint8)
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    described = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    return (described.data or 0) + int(described.byte_offset)


# Bytes of a cache line: TensorFlow splits without a copy only at its boundaries.
LINE = 64

Function = Callable[..., Any]


class HostCalled(Exception):
    """A function that XLA is to compile calls the host."""


_compiling: list[None] = []


@contextlib.contextmanager
def without_host() -> Iterator[None]:
    """Returns a context in which `on_host` raises `HostCalled`."""
    _compiling.append(None)
    try:
        yield
    finally:
        _compiling.pop()


def on_host(
    function: Function,
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    dtypes: Sequence[Any] | None = None,
    buffers: Sequence[Sequence[int]] = (),
    on_device: bool = False,
) -> list[Any]:
    """Runs a function of numpy arrays on tensors: eagerly, or when the graph runs.

    Each of `buffers` lists results that are views of one buffer, which belongs to the graph, in the
    order of their addresses. Their dtypes are equal, their shapes known.
    """
    if _compiling:
        raise HostCalled
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
    on_device = on_device and uses_gpu()
    place = call_on_device if on_device else call_on_host
    runs = [] if tf.executing_eagerly() or on_device else _runs(buffers, shapes, dtypes)
    if not runs:
        return _call(function, tensors, shapes, dtypes, place)
    joined = {index for run in runs for index in run}
    runs += [[index] for index in range(len(dtypes)) if index not in joined]

    def call_and_join(*arrays: np.ndarray) -> list[np.ndarray]:
        results = function(*arrays)
        return [_join([results[index] for index in run]) for run in runs]

    run_shapes = [_run_shape([shapes[index] for index in run], dtypes[run[0]]) for run in runs]
    run_dtypes = [dtypes[run[0]] for run in runs]
    outputs = _call(call_and_join, tensors, run_shapes, run_dtypes)
    results: dict[int, Any] = {}
    for run, output in zip(runs, outputs, strict=True):
        split = [output] if len(run) == 1 else _split(output, [shapes[index] for index in run])
        results.update(zip(run, split, strict=True))
    return [results[index] for index in range(len(dtypes))]


def _call(
    function: Function,
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    dtypes: Sequence[Any],
    place: Any = call_on_host,
) -> list[Any]:
    outputs = place(function, tensors, dtypes)
    if not dtypes:
        return []
    # An eager call returns a single output without a list.
    results = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def _runs(
    buffers: Sequence[Sequence[int]], shapes: Sequence[Any], dtypes: Sequence[Any]
) -> list[list[int]]:
    """Returns lists of two or more results of a buffer to join, which fill whole cache lines."""
    runs: list[list[int]] = []
    for buffer in buffers:
        runs.append([])
        for index in buffer:
            count = tf.TensorShape(shapes[index]).num_elements()
            if count and count * dtypes[index].size % LINE == 0:
                runs[-1].append(index)
            else:
                runs.append([])
    return [run for run in runs if len(run) > 1]


def _run_shape(shapes: Sequence[Any], dtype: Any) -> Any:
    """Returns the shape of a run: (cache lines, elements per line), or that of a single result."""
    if len(shapes) == 1:
        return shapes[0]
    line = LINE // dtype.size
    return sum(tf.TensorShape(shape).num_elements() for shape in shapes) // line, line


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a run as one array, without a copy if its arrays are adjacent in memory."""
    first, last = arrays[0], arrays[-1]
    if len(arrays) == 1:
        return first
    line, nbytes = LINE // first.itemsize, sum(array.nbytes for array in arrays)
    base, span = first.base, last.ctypes.data + last.nbytes - first.ctypes.data
    # The views of a buffer are in the order of their addresses, as `buffers` states.
    if span == nbytes and all(array.base is base is not None for array in arrays):
        # As bytes: numpy has no names for some dtypes.
        lines = as_strided(first.reshape(-1).view(np.uint8), (nbytes // LINE, LINE), (LINE, 1))
        return lines.view(first.dtype)
    # Adasum allocates each result separately.
    return np.concatenate([array.reshape(-1) for array in arrays]).reshape(-1, line)


def _split(run: Any, shapes: Sequence[Any]) -> list[Any]:
    lines = [tf.TensorShape(shape).num_elements() // run.shape[1] for shape in shapes]
    pairs = zip(tf.split(run, lines), shapes, strict=True)
    return [tf.reshape(result, shape) for result, shape in pairs]


def differentiable(
    forward: Callable[..., list[Any]],
    backward: Callable[..., list[Any]],
    tensors: Sequence[Any],
) -> list[Any]:
    """Runs a function of tensors that has a gradient."""
    if not tensors or (tf.executing_eagerly() and not is_recorded()):
        return forward(*tensors)

    @tf.custom_gradient
    def run(*given: Any) -> Any:
        results = forward(*given)

        def gradient(*upstream: Any) -> list[Any]:
            return backward(results, list(upstream))

        return results, gradient

    return list(run(*tensors))


class QueuedBuckets:
    """The buckets of a plan in one graph: operations that queue them, and that wait for them."""

    def __init__(self, fused: Any, on_device: bool):
        self._plan, self._on_device = fused.weak(), on_device
        self._handles: dict[int, Any] = {}
        self._queued: list[tf.Tensor] = []  # one for each bucket: it has been queued

    def queue(self, number: int, tensors: Sequence[tf.Tensor], lend: bool) -> None:
        """Adds an operation that queues a bucket; call it for the buckets in their order."""

        def start(*arrays: Any) -> np.int64:
            # The handle keeps the arrays, and they the memory of the tensors.
            self._handles[number] = self._plan().queue_bucket(number, arrays, lend)
            return np.int64(number)

        self._queued += on_host(start, tensors, [()], [tf.int64], on_device=self._on_device)

    def results(
        self, number: int, tensors: Sequence[tf.Tensor], shapes: Sequence[Any], buffers: Any
    ) -> list[tf.Tensor]:
        """Adds an operation that waits for a bucket; call it when all have been queued."""

        def wait(*_: Any) -> list[Any]:
            return self._handles.pop(number).wait()

        # A thread of TensorFlow that waits computes nothing: first, all buckets are queued.
        dtypes = [tensor.dtype for tensor in tensors]
        return on_host(wait, self._queued, shapes, dtypes, buffers, on_device=self._on_device)
