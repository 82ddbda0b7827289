"""Keys by which ranks tell variables apart: their paths, without what Keras numbers by itself.

Keras numbers variables and layers of one class that have no name, in the order in which a process
makes them. A rank that has made other models before, or has loaded its model, has other numbers.
"""

import functools
import re
from collections.abc import Iterator, Sequence

import keras


@functools.lru_cache(maxsize=64)
def variable_keys(paths: Sequence[str], model: str = "") -> tuple[str, ...]:
    """Returns a key for each variable of a model.

    Automatic numbers count from the first of the model.
    """
    # The name of a Sequential model leads the paths, but is absent after loading.
    leading = rf"^({re.escape(model)}|sequential(_\d+)?)/"
    split = [re.sub(leading, "", path).split("/") for path in paths]
    automatic = set(_automatic_names())
    first: dict[str, int] = {}
    for base, number in (_numbered(part) for parts in split for part in parts):
        first[base] = min(number, first.get(base, number))

    def key(part: str) -> str:
        base, number = _numbered(part)
        return f"{base}_{number - first[base]}" if base in automatic else part

    return tuple("/".join(map(key, parts)) for parts in split)


def _numbered(part: str) -> tuple[str, int]:
    base, _, number = part.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (part, 0)


def _automatic_names() -> Iterator[str]:
    """Yields the names that Keras gives to what has no name, before it adds numbers."""
    classes = [keras.Layer, keras.Variable]
    while classes:
        cls = classes.pop()
        classes.extend(cls.__subclasses__())
        words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", cls.__name__)
        yield re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
