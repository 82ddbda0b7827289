"""Values of a state as JSON, which restores them as they are, or refuses them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_dist import errors, runtime


def as_json(values: Mapping[str, Any]) -> str:
    """Returns named values as a JSON document."""
    pairs = [f'"{name}": {_json_of(name, value)}' for name, value in values.items()]
    return f"{{{', '.join(pairs)}}}"


def _json_of(name: str, value: Any) -> str:
    try:
        return json.dumps(_plain(value))
    except (TypeError, ValueError, RecursionError) as error:
        expected = f"{name} to be a JSON value, in a state with a directory"
        remedy = "Keep only numbers, strings, lists and dicts with string keys in it."
        raise errors.ArgumentTypeError(runtime.where(), expected, str(error), remedy) from None


def _plain(value: Any) -> Any:
    """Returns a value as JSON restores it; refuses values that JSON would change."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):  # JSON would convert it to a string
                raise TypeError(f"a dictionary with the key {key!r}")
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__}")
