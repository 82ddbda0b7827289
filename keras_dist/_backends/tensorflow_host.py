"""Host functions of numpy arrays as operations of a TensorFlow graph, by `tf.numpy_function`.

Conversion of an array to a tensor takes a graph several times as long as a split of a tensor. So
results that are adjacent in memory become one tensor, which is split without a copy. TensorFlow may
write to such a slice if it has no other reader, but never to a converted array. So this is only for
results whose memory belongs to the graph: a write to a leased result ends the lease.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.lib.stride_tricks import as_strided

from keras_dist._backends.tensorflow_device import call_on_device, uses_gpu

# XLA shows the name in the error about an operation that it cannot compile.
NODE = "keras_dist_calls_the_host.leave_out_jit_compile"
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

    Args:
        function: takes an array for each tensor; returns a list with an array for each of
            `shapes`, or a single array.
        shapes: of the results; an unknown dimension is `None`.
        buffers: lists of indices of results that are views of one buffer, which belongs to the
            graph, in the order of their addresses. Their dtypes are equal, their shapes known.
            Defaults to none.
    """
    if _compiling:
        raise HostCalled
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
    on_device = on_device and uses_gpu()
    place = call_on_device if on_device else tf.numpy_function
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
    place: Any = tf.numpy_function,
) -> list[Any]:
    outputs = place(function, tensors, dtypes, name=NODE)
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
    """Returns lists of indices of results to be joined: two or more of a buffer.

    Each result fills whole cache lines.
    """
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
    """Returns the results in a run."""
    lines = [tf.TensorShape(shape).num_elements() // run.shape[1] for shape in shapes]
    pairs = zip(tf.split(run, lines), shapes, strict=True)
    return [tf.reshape(result, shape) for result, shape in pairs]
