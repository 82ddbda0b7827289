"""The gradients of reduced gradients, for a tape around a distributed one."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dist import errors, runtime
from keras_dist._backends.tensorflow_host import differentiable
from keras_dist._compat.tensorflow import is_recorded
from keras_dist.ops.face import Reduction
from keras_dist.runtime.process_sets import global_process_set
from keras_dist.tensorflow.reduce_ops import grouped_allreduce
from keras_dist.training.gradient_reduction import GradientReduction


def reduced_with_gradient(
    reduce: Callable[..., list[Any]], reduction: GradientReduction, gradients: Sequence[Any]
) -> list[Any]:
    """Reduces dense gradients; sums and averages have the gradient of `allreduce`. Collective."""
    op, process_set = reduction.options.op, reduction.options.process_set or global_process_set
    if reduction.communicator() is None:
        return reduce(*gradients)
    if not is_recorded():
        results = reduce(*gradients)
        return results if tf.executing_eagerly() else [_without_gradient(each) for each in results]

    def back(_: Any, upstream: list[Any]) -> list[Any]:
        Reduction(op, None, 1.0, 1.0, process_set).check_differentiable()
        return grouped_allreduce(upstream, op=op, process_set=process_set)

    return differentiable(reduce, back, gradients)


def guarded(reduction: GradientReduction, rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns reduced rows; in a graph, a tape that would take them for constants raises."""
    if reduction.communicator() is None or tf.executing_eagerly():
        return rows
    return tf.IndexedSlices(_without_gradient(rows.values), rows.indices, rows.dense_shape)


def _without_gradient(tensor: Any) -> Any:
    """Raises an error where a tape outside of the function would take the result for a constant."""
    message = errors.explain(
        runtime.where(),
        "a tape around a DistributedGradientTape in the tf.function of that tape",
        "a tape around a call of the function",
        "Take both gradients in one tf.function, or do not compile the function.",
    )
    return tf.raw_ops.PreventGradient(input=tensor, message=message)
