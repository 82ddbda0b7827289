"""A collective as an operation of TensorFlow: on the host, eagerly or in a graph."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from keras_dist._backends.tensorflow import on_host
from keras_dist.tensorflow.failures import as_tensorflow_raises

__all__ = ["collective", "differentiable", "operation"]

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
) -> list[Any]:
    """Runs a collective of arrays on tensors; see `on_host`."""

    def called(*arrays: Any) -> Any:
        with as_tensorflow_raises():
            return function(*arrays)

    return on_host(called, tensors, shapes, dtypes)


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
    if not tensors:
        return forward()

    @tf.custom_gradient
    def run(*given: Any) -> Any:
        results = forward(*given)

        def gradient(*upstream: Any) -> list[Any]:
            return backward(results, list(upstream))

        return results, gradient

    return list(run(*tensors))
