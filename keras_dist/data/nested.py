"""Arrays in tuples, lists and dicts, as Keras takes a batch; and what becomes an array."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_dist.data.kinds import is_a

__all__ = ["as_array", "concatenated", "described", "leaves", "mapped", "stacked"]


def mapped(function: Callable[..., Any], data: Any, *others: Any) -> Any:
    """Applies a function to every leaf, with those of others in its place.

    Lists become tuples, as Keras takes a batch.
    """
    if isinstance(data, dict):
        return {
            key: mapped(function, value, *(other[key] for other in others))
            for key, value in data.items()
        }
    if isinstance(data, tuple | list):
        return tuple(
            mapped(function, value, *(other[place] for other in others))
            for place, value in enumerate(data)
        )
    return function(data, *others)


def leaves(data: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    """Yields the leaves with how a user would write each."""
    if isinstance(data, dict | tuple | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from leaves(value, f"{path}[{key!r}]")
    else:
        yield path, data


def as_array(leaf: Any) -> np.ndarray:
    """Returns a numpy array of an array of any framework, of a frame or column of pandas, a number.

    As Keras takes them: a column has an axis of its own, and floats of pandas become `floatx`.
    """
    if is_a(leaf, "torch", "Tensor"):
        return leaf.detach().cpu().numpy()
    array = np.asarray(leaf)
    if is_a(leaf, "pandas", "DataFrame", "Series"):
        import keras

        array = array[:, None] if array.ndim == 1 else array
        if np.issubdtype(array.dtype, np.floating):
            array = array.astype(keras.config.floatx(), copy=False)
    return array


def stacked(samples: Sequence[Any]) -> Any:
    """Returns a batch of single samples that are nested alike."""
    return mapped(lambda *each: np.stack([as_array(leaf) for leaf in each]), *samples)


def concatenated(batches: Sequence[Any]) -> Any:
    """Returns one batch of several that are nested alike."""
    if len(batches) == 1:
        return batches[0]
    return mapped(lambda *each: np.concatenate([as_array(leaf) for leaf in each]), *batches)


def described(data: Any) -> list[str]:
    """Returns dtype and shape, but for the first axis, of every array, for ranks to compare."""
    return [f"{path}: {array.dtype} {array.shape[1:]}" for path, array in leaves(data)]
