"""Kinds of data, told without a framework, and nested tuples, lists and dicts of arrays."""

import itertools
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_dist import _backends
from keras_dist._compat.python import is_named_tuple
from keras_dist.ops.arguments import native


def is_a(data: Any, package: str, *names: str) -> bool:
    """Tells whether an object is an instance of a class of a package, or of a subclass."""
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == package
        for kind in type(data).__mro__
    )


def is_tf_dataset(data: Any) -> bool:
    """Tells whether an object is a `tf.data.Dataset`."""
    return is_a(data, "tensorflow", "DatasetV2")


def is_tensor(data: Any) -> bool:
    """Tells whether numpy can convert an object: a framework's tensor, or pandas data."""
    return hasattr(data, "__array__") and not is_a(data, "tensorflow", "RaggedTensor")


def mapped(function: Callable[..., Any], data: Any, *others: Any) -> Any:
    """Applies a function to each leaf, together with the corresponding leaves of `others`."""
    if isinstance(data, dict):
        return {
            key: mapped(function, value, *(other[key] for other in others))
            for key, value in data.items()
        }
    if isinstance(data, tuple | list):
        # Lists become tuples, as Keras expects in a batch.
        values = (
            mapped(function, value, *(other[index] for other in others))
            for index, value in enumerate(data)
        )
        return type(data)(*values) if is_named_tuple(data) else tuple(values)
    return function(data, *others)


def leaves(data: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    """Yields each leaf with the expression that selects it, such as `data['x'][0]`."""
    if isinstance(data, dict | tuple | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from leaves(value, f"{path}[{key!r}]")
    else:
        yield path, data


def as_array(leaf: Any) -> np.ndarray:
    """Converts a framework's tensor, pandas data or a number to a numpy array, as Keras does.

    The array has the byte order of this machine, which frameworks require. A pandas column becomes
    an array of shape `(rows, 1)`; floats of pandas become `floatx`.
    """
    if is_a(leaf, "torch", "Tensor"):
        return _backends.load("torch").host_array(leaf)
    if is_a(leaf, "pandas", "DataFrame"):
        kinds = {dtype.kind for dtype in leaf.dtypes}
        is_plain = "b" not in kinds and all(isinstance(one, np.dtype) for one in leaf.dtypes)
        if not is_plain and "f" in kinds <= set("biuf"):  # they would become objects
            return in_floatx(leaf.to_numpy("float64", na_value=np.nan))
    array = native(np.asarray(leaf))
    if is_a(leaf, "pandas", "DataFrame", "Series"):
        array = in_floatx(array[:, None] if array.ndim == 1 else array)
    return array


def in_floatx(array: np.ndarray) -> np.ndarray:
    """Converts floats to `floatx`, as Keras does with the arrays that `fit` is given."""
    import keras

    is_float = array.dtype.name.startswith(("float", "bfloat"))
    return array.astype(keras.config.floatx(), copy=False) if is_float else array


def stacked(samples: Sequence[Any]) -> Any:
    """Stacks samples of one structure into a batch."""
    return mapped(lambda *each: np.stack([as_array(leaf) for leaf in each]), *samples)


def concatenated(batches: Sequence[Any]) -> Any:
    """Concatenates batches of one structure."""
    if len(batches) == 1:
        return batches[0]
    return mapped(lambda *each: np.concatenate([as_array(leaf) for leaf in each]), *batches)


def described(data: Any) -> list[str]:
    """Returns path, dtype and sample shape of each array, for comparison across ranks."""
    return [f"{path}: {array.dtype} {array.shape[1:]}" for path, array in leaves(data)]


# --- Some rows of a data set, for comparison across ranks

SOME = 8  # numbers of a row
CLOSE = 0.01  # of the largest of them


class SomeRows:
    """Some numbers of a few rows; equal to others whose floats and bytes are close.

    Ranks on other machines may have computed floats, or decoded pictures, a little otherwise.
    """

    def __init__(self, data: Any, count: int):
        positions = sorted({0, count // 2, count - 1})
        self._values = {
            path: [_some(np.asarray(array[position])) for position in positions]
            for path, array in leaves(data)
            if array.dtype.kind in "biufSU"
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SomeRows) and all(
            map(
                _alike,
                itertools.chain(*self._values.values()),
                itertools.chain(*other._values.values()),
            )
        )

    def __repr__(self) -> str:
        shown = reprlib.Repr()
        shown.maxlist = SOME
        return shown.repr(self._values)


def _some(row: np.ndarray) -> np.ndarray:
    numbers = row.ravel()
    some = numbers[:: max(1, numbers.size // SOME)][:SOME]
    return some.astype("float64") if some.dtype.kind == "f" or some.dtype == np.uint8 else some


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return np.array_equal(one, other)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return False
    one, other = one[finite], other[finite]
    scale = np.abs(one).max(initial=0)
    return bool(np.all(np.abs(one - other) <= CLOSE * scale))
