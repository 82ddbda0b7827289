"""Losses of a batch: whether they are means over its samples, and of how many elements."""

import contextlib
import functools
import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import errors
from keras_dist._compat.keras.callbacks import is_part_of_keras

# Losses over a batch as a whole: if they return one number, or in any case.
OVER_BATCHES = {"dice": False, "tversky": False, "circle": True}
ROWS, SIZE = 4, 3  # of a batch that a loss is tried on, and of its axes of unknown size
MOST_ELEMENTS = 2**18
WHOLE = [(getattr(keras.losses, name), always) for name, always in OVER_BATCHES.items()]


def _is_of_keras(loss: Any) -> bool:
    """Returns whether Keras alone computes a loss."""
    call = type(loss).call
    return all(map(is_part_of_keras, (type(loss).__call__, call, vars(loss).get("fn", call))))


def is_of_whole_batch(loss: Any, values: Any) -> bool:
    """Returns whether a loss of Keras compares samples with each other."""
    function, is_number = vars(loss).get("fn"), not len(getattr(values, "shape", ()))
    # A function of the user may have no hash.
    always = next((always for known, always in WHOLE if known is function), None)
    return always is not None and (is_number or always)


def shapes_tell(loss: Any, values: Any, y_true: Any, y_pred: Any) -> bool:
    """Returns whether the number of elements of a loss is the same for all batches of a shape.

    A loss of the user may leave elements out by what they are, as `y_pred[y_true > 0]` does.
    """
    backend = keras.config.backend()
    if backend == "jax" or not len(getattr(values, "shape", ())) or _is_of_keras(loss):
        return True
    if backend == "torch":
        return False
    from keras_dist._compat.tensorflow import has_known_shape

    def unreduced(*arguments: Any) -> Any:
        convert = functools.partial(ops.convert_to_tensor, dtype=loss.dtype)
        return loss.call(*(keras.tree.map_structure(convert, each) for each in arguments))

    return has_known_shape(unreduced, y_true, y_pred)


def of_parts(loss: Any, y_true: Any, y_pred: Any) -> str:
    """Returns what the number that a loss of the user has for a batch is of those of its parts.

    Their `"mean"`, their `"sum"`, or `"neither"`. The loss is tried on a few rows of these shapes,
    apart from its variables; it counts as a mean if it cannot be tried.
    """
    function = loss.call if is_part_of_keras(type(loss).__call__) else loss
    rng, halves = np.random.default_rng(0), (slice(ROWS // 2), slice(ROWS // 2, None))
    try:
        with keras.StatelessScope(), _eagerly():
            drawn = [
                (rng.integers(0, 2, _small_shape(y_true)), y_true.dtype),
                (rng.uniform(0.1, 0.9, _small_shape(y_pred)), y_pred.dtype),
            ]
            targets, outputs = (
                ops.convert_to_tensor(array.astype("float32"), dtype) for array, dtype in drawn
            )
            whole, *parts = (
                float(ops.convert_to_numpy(function(targets[rows], outputs[rows])))
                for rows in (slice(None), *halves)
            )
    except errors.KerasDistError:  # it communicates, and the ranks differ
        raise
    except Exception:  # of other people's code, for data that it was not made for
        return "mean"
    if not math.isfinite(whole) or math.isclose(whole, np.mean(parts), rel_tol=1e-3, abs_tol=1e-6):
        return "mean"
    return "sum" if math.isclose(whole, sum(parts), rel_tol=1e-3) else "neither"


def _small_shape(tensor: Any) -> tuple[int, ...]:
    shape = (ROWS, *(SIZE if size is None else size for size in tensor.shape[1:]))
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"{shape} is too large to be tried")
    return shape


def _eagerly() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which operations run at once, also where a step is traced."""
    backend = keras.config.backend()
    if backend == "tensorflow":
        from keras_dist._compat.tensorflow import eagerly
    elif backend == "jax":
        from keras_dist._compat.jax import eagerly
    else:
        return contextlib.nullcontext()
    return eagerly()
