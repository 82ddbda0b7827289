"""Errors of keras_dist as scripts that know Horovod catch them: by TensorFlow's classes.

Each is still the error that it was. Where the graph of a `tf.function` runs, TensorFlow makes an
error of its own of whatever the host raises, and keeps the text: an `InvalidArgumentError` of what
is wrong with arguments, an `UnknownError` of ranks that differ.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_dist import errors

__all__ = [
    "FailedPreconditionError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "as_tensorflow_raises",
]


class FailedPreconditionError(tf.errors.FailedPreconditionError, errors.MismatchError):
    """The ranks do not mean the same thing."""


class InvalidArgumentError(tf.errors.InvalidArgumentError, errors.ArgumentError):
    """An argument has a value that cannot be used."""


class InvalidTypeError(tf.errors.InvalidArgumentError, errors.ArgumentTypeError):
    """An argument is of a kind that cannot be used."""


BECOMES = {
    errors.MismatchError: FailedPreconditionError,
    errors.ArgumentError: InvalidArgumentError,
    errors.ArgumentTypeError: InvalidTypeError,
}


@contextlib.contextmanager
def as_tensorflow_raises() -> Iterator[None]:
    """Makes errors of keras_dist those of TensorFlow as well."""
    try:
        yield
    except errors.KerasDistError as error:
        if type(error) not in BECOMES:
            raise
        raise BECOMES[type(error)](None, None, str(error)) from error
