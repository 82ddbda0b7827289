"""Private and undocumented names of TensorFlow; `tf_data` has those of tf.data."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist._compat.contract import Owner, has, require

SOME = 24  # rows, where a graph does not know their number; a loss may group them


def version() -> str:
    """Returns the name and the version of TensorFlow."""
    return f"TensorFlow {tf.__version__}"


def is_recorded() -> bool:
    """Returns whether a gradient tape may record the current operation."""
    return bool(require(RECORD, version).could_possibly_record())


def eager_tensor(array: Any, device: str | None) -> Any:
    """Returns an array as a tensor on a device, in a fifth of the time of `tf.constant`."""
    return _eager_class()(array, device, None)


def has_known_shape(function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether the shape of a result depends on the shapes of its arguments alone."""
    if tf.executing_eagerly():
        # Shapes of eager tensors say nothing about those of other values.
        return False

    def spec(tensor: Any) -> Any:
        return tf.TensorSpec([SOME if n is None else n for n in tensor.shape], tensor.dtype)

    try:
        given = tf.nest.map_structure(spec, arguments)
        traced = tf.function(function, autograph=False).get_concrete_function(*given)
        return bool(traced.structured_outputs.shape.is_fully_defined())
    except Exception:  # of the function, for these shapes
        return False


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

AUTOGRAPH = Owner("tensorflow.python.autograph.core.config")
RULES = tuple(
    AUTOGRAPH.name(
        name,
        "to keep AutoGraph from converting its functions",
        "tracing a step would take longer",
        on_use=True,
    )
    for name in ("CONVERSION_RULES", "DoNotConvert", "Convert")
)

CONTRACT = (RECORD, *RULES)

if has(*RULES):  # AutoGraph calls functions of this package as they are, as it does those of Keras
    _config = RULES[0].resolve()
    _config.CONVERSION_RULES = (
        _config.Convert("keras_dist.training"),  # calls methods of the optimizers of users
        _config.DoNotConvert("keras_dist"),
        *_config.CONVERSION_RULES,
    )
