"""Collectives as TensorFlow operations that run on the host, eagerly or in a graph."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from keras_dist import errors
from keras_dist._backends.tensorflow_host import as_array, on_host
from keras_dist._compat.tensorflow import eager_tensor, is_recorded


class FailedPreconditionError(tf.errors.FailedPreconditionError, errors.MismatchError):
    """The ranks call different operations or pass different values."""


class InvalidArgumentError(tf.errors.InvalidArgumentError, errors.ArgumentError):
    """An argument has an invalid value."""


class InvalidTypeError(tf.errors.InvalidArgumentError, errors.ArgumentTypeError):
    """An argument has an invalid type."""


BECOMES = {
    errors.MismatchError: FailedPreconditionError,
    errors.ArgumentError: InvalidArgumentError,
    errors.ArgumentTypeError: InvalidTypeError,
}


def raise_tensorflow_error(error: errors.KerasDistError) -> NoReturn:
    """Raises an error of keras_dist as one that is also an error of TensorFlow."""
    if type(error) not in BECOMES:
        raise error
    raise BECOMES[type(error)](None, None, str(error)) from error


CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

P = ParamSpec("P")
R = TypeVar("R")


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of this package, so that its errors are TensorFlow's too."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except errors.KerasDistError as error:
            raise_tensorflow_error(error)

    return called


def as_tensors(values: Sequence[Any]) -> list[Any]:
    """Returns values, also variables, as tensors."""
    # The check saves the time that `convert_to_tensor` takes for tensors.
    return [v if isinstance(v, tf.Tensor) else tf.convert_to_tensor(v) for v in values]


def collective(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    dtypes: Sequence[Any] | None = None,
    buffers: Sequence[Sequence[int]] = (),
) -> list[Any]:
    """Runs a collective on the arrays of tensors. See `on_host`."""

    def called(*arrays: Any) -> Any:
        try:
            return function(*arrays)
        except errors.KerasDistError as error:
            raise_tensorflow_error(error)

    if not tf.executing_eagerly():
        return on_host(called, tensors, shapes, dtypes, buffers)
    results = called(*map(as_array, tensors))
    arrays = results if isinstance(results, list | tuple) else [results]
    return [as_eager(np.asarray(array)) for array in arrays]


def is_eager(value: Any) -> bool:
    """Returns whether a value is a tensor whose array can be read, and no tape is recording."""
    return tf.executing_eagerly() and isinstance(value, tf.Tensor) and not is_recorded()


def as_eager(array: np.ndarray) -> Any:
    """Returns an array as a tensor on the CPU."""
    return eager_tensor(array, _device())


@functools.cache
def _device() -> str | None:
    # TensorFlow parses the name in each call, so it is given only if there is a choice.
    return CPU if tf.config.list_logical_devices("GPU") else None
