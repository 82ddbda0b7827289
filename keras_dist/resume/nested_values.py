"""Nested values as JSON and bytes: reading a backup executes no code."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.training.model_state import bytes_of

# Exact types: a `numpy.float64` is a `float` as well, and must keep its type.
PLAIN = (type(None), bool, int, float, str)
LISTS: dict[str, Any] = {"list": list, "tuple": tuple}


def pack(value: Any, arrays: list[np.ndarray]) -> Any:
    """Converts a nested value to JSON and bytes.

    Args:
        arrays: list to which the bytes of each array are appended.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return {"dict": [[_key(key), pack(inner, arrays)] for key, inner in value.items()]}
    for name, kind in LISTS.items():
        if isinstance(value, kind):
            return {name: [pack(inner, arrays) for inner in value]}
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array("array" if isinstance(value, np.ndarray) else "scalar", value, arrays)
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        return _pack_array("tensor", keras.ops.convert_to_numpy(value), arrays)
    raise TypeError(f"{value!r} of type {type(value).__name__}")


def unpack(packed: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Returns the value of a result of `pack`; variables become tensors."""
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "dict":
        return {key: unpack(inner, arrays) for key, inner in content}
    if kind in LISTS:
        return LISTS[kind](unpack(inner, arrays) for inner in content)
    number, dtype, shape = content
    array = arrays[number].view(np.dtype(dtype)).reshape(shape).copy()
    if kind == "tensor":
        return keras.ops.convert_to_tensor(array)
    return array if kind == "array" else array[()]


def _key(key: Any) -> Any:
    if type(key) not in PLAIN:
        raise TypeError(f"the key {key!r} of type {type(key).__name__}")
    return key


def _pack_array(kind: str, value: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"an array of {array.dtype}")
    # numpy finds extension dtypes, such as bfloat16, only by name.
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    arrays.append(bytes_of(array))
    return {kind: [len(arrays) - 1, dtype, list(array.shape)]}
