"""Private and undocumented names of TensorFlow; `tf_data` has those of tf.data."""

import functools
from typing import Any

import tensorflow as tf

from keras_dist._compat.contract import Owner, require


def version() -> str:
    """Returns the name and the version of TensorFlow."""
    return f"TensorFlow {tf.__version__}"


def is_recorded() -> bool:
    """Returns whether a gradient tape may record the current operation."""
    return bool(require(RECORD, version).could_possibly_record())


def eager_tensor(array: Any, device: str | None) -> Any:
    """Returns an array as a tensor on a device, in a fifth of the time of `tf.constant`."""
    return _eager_class()(array, device, None)


@functools.cache
def _eager_class() -> Any:
    # Not at import: the first tensor fixes TensorFlow's threads and devices.
    return type(tf.constant(0))


RECORD = Owner("tensorflow.python.eager.record").method(
    "could_possibly_record()",
    "to give a collective a gradient only when a tape records it",
    "collectives would have no gradient, or be slower",
    on_use=True,
)

CONTRACT = (RECORD,)
