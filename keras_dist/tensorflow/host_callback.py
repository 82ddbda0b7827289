"""A collective as an operation of TensorFlow: on the host, eagerly or in a graph."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from keras_dist._backends.tensorflow import on_host
from keras_dist._compat.tensorflow import eager_tensor, is_recorded
from keras_dist.tensorflow.failures import as_tensorflow_raises

__all__ = ["collective", "differentiable", "operation"]

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

P = ParamSpec("P")
R = TypeVar("R")


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function of this package raise as TensorFlow does, and be left by AutoGraph."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with as_tensorflow_raises():
            return function(*args, **kwargs)

    return tf.autograph.experimental.do_not_convert(called)


def collective(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    dtypes: Sequence[Any] | None = None,
    buffers: Sequence[Sequence[int]] = (),
) -> list[Any]:
    """Runs a collective of arrays on tensors; see `on_host`."""

    def called(*arrays: Any) -> Any:
        with as_tensorflow_raises():
            return function(*arrays)

    if not tf.executing_eagerly():
        return on_host(called, tensors, shapes, dtypes, buffers)
    results = called(*map(np.asarray, tensors))
    listed = results if isinstance(results, list | tuple) else [results]
    place = _place()
    return [eager_tensor(np.asarray(result), place) for result in listed]


def differentiable(
    forward: Callable[..., list[Any]],
    backward: Callable[..., list[Any]],
    tensors: Sequence[Any],
) -> list[Any]:
    """Runs a function of tensors that has a gradient.

    Args:
        forward: takes the tensors, gives a list of results.
        backward: takes the list of results and that of their gradients, gives those of the tensors.
        tensors: what `forward` is given.
    """
    if not tensors or (tf.executing_eagerly() and not is_recorded()):
        return forward(*tensors)

    @tf.custom_gradient
    def run(*given: Any) -> Any:
        results = forward(*given)

        def gradient(*upstream: Any) -> list[Any]:
            return backward(results, list(upstream))

        return results, gradient

    return list(run(*tensors))


@functools.cache
def _place() -> str | None:
    # To read the name takes TensorFlow a third of what it does: it is told where there is a choice.
    return CPU if tf.config.list_logical_devices("GPU") else None
