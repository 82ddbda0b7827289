"""A function of numpy arrays as an operation of a graph of TensorFlow's, by `tf.numpy_function`.

To make a tensor of an array takes a graph several times as long as to cut a tensor in pieces. So
results that lie one behind the other become one tensor, and that is cut, without a copy. TensorFlow
may write to a piece of a tensor when nobody else reads it, and does not to a whole array. It is for
results whose memory is the graph's alone: whoever writes to what is lent is lent no more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.lib.stride_tricks import as_strided

__all__ = ["on_host"]

# XLA shows it where it meets what it cannot compile.
NODE = "keras_dist_calls_the_host.leave_out_jit_compile"
# Bytes of a cache line: TensorFlow cuts nowhere else without a copy.
LINE = 64

Function = Callable[..., Any]


def on_host(
    function: Function,
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    dtypes: Sequence[Any] | None = None,
    buffers: Sequence[Sequence[int]] = (),
) -> list[Any]:
    """Runs a function of numpy arrays on tensors: now, or where the graph runs.

    Args:
        function: takes an array for each tensor, gives one for each of `shapes`: a list, or a
            single one as it is.
        tensors: what it is given.
        shapes: of the results; `None` where a dimension is known only then.
        dtypes: of the results. Defaults to those of `tensors`.
        buffers: which results are views of one buffer, that is the graph's alone: their places, in
            the order in which they lie in it. Their dtypes are equal, their shapes known. Defaults
            to none.
    """
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
    runs = [] if tf.executing_eagerly() else _runs(buffers, shapes, dtypes)
    if not runs:
        return _called(function, tensors, shapes, dtypes)
    within = {place for run in runs for place in run}
    runs += [[place] for place in range(len(dtypes)) if place not in within]

    def in_runs(*arrays: np.ndarray) -> list[np.ndarray]:
        results = function(*arrays)
        return [_joined([results[place] for place in run]) for run in runs]

    rows = [_rows([shapes[place] for place in run], dtypes[run[0]]) for run in runs]
    kinds = [dtypes[run[0]] for run in runs]
    pieces: dict[int, Any] = {}
    for run, output in zip(runs, _called(in_runs, tensors, rows, kinds), strict=True):
        cut = [output] if len(run) == 1 else _cut(output, [shapes[place] for place in run])
        pieces.update(zip(run, cut, strict=True))
    return [pieces[place] for place in range(len(dtypes))]


def _called(
    function: Function, tensors: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    outputs = tf.numpy_function(function, tensors, dtypes, name=NODE)
    if not dtypes:
        return []
    # An eager call gives a single output bare.
    listed = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    for output, shape in zip(listed, shapes, strict=True):
        output.set_shape(shape)
    return listed


def _runs(
    buffers: Sequence[Sequence[int]], shapes: Sequence[Any], dtypes: Sequence[Any]
) -> list[list[int]]:
    """Returns the places of results that become one tensor together, two or more of a buffer.

    Each of them fills whole cache lines.
    """
    runs: list[list[int]] = []
    for buffer in buffers:
        runs.append([])
        for place in buffer:
            count = tf.TensorShape(shapes[place]).num_elements()
            if count and count * dtypes[place].size % LINE == 0:
                runs[-1].append(place)
            else:
                runs.append([])
    return [run for run in runs if len(run) > 1]


def _rows(shapes: Sequence[Any], dtype: Any) -> Any:
    """Returns the shape of a run: cache lines by elements in one; that of a single result."""
    if len(shapes) == 1:
        return shapes[0]
    line = LINE // dtype.size
    return sum(tf.TensorShape(shape).num_elements() for shape in shapes) // line, line


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a run as one array, without a copy where its parts lie one behind the other."""
    first, last = arrays[0], arrays[-1]
    if len(arrays) == 1:
        return first
    line, nbytes = LINE // first.itemsize, sum(array.nbytes for array in arrays)
    base, span = first.base, last.ctypes.data + last.nbytes - first.ctypes.data
    # Views of one buffer lie in it in their order: who calls has said so.
    if span == nbytes and all(array.base is base is not None for array in arrays):
        # As bytes, since numpy knows not every dtype by its name.
        whole = as_strided(first.reshape(-1).view(np.uint8), (nbytes // LINE, LINE), (LINE, 1))
        return whole.view(first.dtype)
    # Adasum makes its results one by one.
    return np.concatenate([array.reshape(-1) for array in arrays]).reshape(-1, line)


def _cut(run: Any, shapes: Sequence[Any]) -> list[Any]:
    """Returns the parts of a run."""
    lines = [tf.TensorShape(shape).num_elements() // run.shape[1] for shape in shapes]
    pairs = zip(tf.split(run, lines), shapes, strict=True)
    return [tf.reshape(piece, shape) for piece, shape in pairs]
