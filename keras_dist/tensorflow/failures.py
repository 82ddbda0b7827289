"""Errors that are both keras_dist's and TensorFlow's, which scripts of Horovod catch.

When the graph of a `tf.function` runs, TensorFlow raises an error of its own with the same text: an
`InvalidArgumentError` for arguments, an `UnknownError` for a mismatch.
"""

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import tensorflow as tf

from keras_dist import errors


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


@contextlib.contextmanager
def raise_tensorflow_errors() -> Iterator[None]:
    """Returns a context in which errors of keras_dist are also errors of TensorFlow."""
    try:
        yield
    except errors.KerasDistError as error:
        raise_tensorflow_error(error)


def raise_tensorflow_error(error: errors.KerasDistError) -> NoReturn:
    """Raises an error of keras_dist as one that is also an error of TensorFlow."""
    if type(error) not in BECOMES:
        raise error
    raise BECOMES[type(error)](None, None, str(error)) from error
