"""Losses of a batch: whether they are means over its samples, and of how many elements."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist._compat.keras.callbacks import is_part_of_keras

# Losses over a batch as a whole: if they return one number, or in any case.
OVER_BATCHES = {"dice": False, "tversky": False, "circle": True}
WHOLE = [(getattr(keras.losses, name), always) for name, always in OVER_BATCHES.items()]


def _is_of_keras(loss: Any) -> bool:
    """Returns whether Keras alone computes a loss."""
    call = type(loss).call
    return all(map(is_part_of_keras, (type(loss).__call__, call, vars(loss).get("fn", call))))


def function_of(loss: Any) -> Any:
    """Returns what a loss computes of targets and outputs before Keras reduces it."""
    if not is_part_of_keras(type(loss).__call__):
        return loss
    convert = functools.partial(ops.convert_to_tensor, dtype=loss.dtype)
    return lambda *given: loss.call(*(keras.tree.map_structure(convert, each) for each in given))


def is_of_whole_batch(loss: Any, values: Any) -> bool:
    """Returns whether a loss of Keras compares samples with each other."""
    function, is_number = vars(loss).get("fn"), not len(getattr(values, "shape", ()))
    # A function of the user may have no hash.
    always = next((always for known, always in WHOLE if known is function), None)
    return always is not None and (is_number or always)


def shapes_tell(loss: Any, values: Any, y_true: Any, y_pred: Any) -> bool:
    """Returns whether the number of elements of a loss is the same for all batches of a shape."""
    # A loss of the user may leave elements out by what they are, as `y_pred[y_true > 0]` does.
    backend = keras.config.backend()
    if backend == "jax" or not len(getattr(values, "shape", ())) or _is_of_keras(loss):
        return True
    if backend == "torch":
        return False
    from keras_dist._compat.tensorflow import has_known_shape

    return has_known_shape(function_of(loss), y_true, y_pred)


def is_of_rows(values: Any, outputs: Sequence[Any]) -> bool:
    """Returns whether a row of a loss has as many elements on all ranks, as an output tells."""
    row = () if values is None else tuple(ops.shape(values)[1:])
    if not all(isinstance(size, int) for size in row):
        return False
    shapes = [tuple(output.shape[1:]) for output in keras.tree.flatten(outputs)]
    # With all axes of an output it may be the loss of pairs of rows.
    return not row or any(row == shape[: len(row)] != shape for shape in shapes)
