"""The gradients of a rank by variable, and zeros in place of those that only other ranks have.

Ranks tell variables apart by their paths, without what Keras numbers by itself: a rank that has
made other models before, or has loaded its model, has other numbers.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_dist import _backends
from keras_dist.training.model_state import variable_name


class RankGradients:
    """The gradients of this rank, in the order of the variables of the optimizer."""

    def __init__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        known: Sequence[Any],
        local: set[int],
        model: str,
    ):
        pairs = list(zip(gradients, variables, strict=True))
        keys = list(map(key_of, variables))
        if known is variables or len(set(keys)) < len(keys):  # possibly twice the same variable
            self._given, slots = dict(enumerate(pairs)), list(enumerate(variables))
        else:
            self._given = dict(zip(keys, pairs, strict=True))
            slots = [(key_of(variable), variable) for variable in known]
        # Keras refuses variables that it does not know.
        self._order = dict.fromkeys([*(slot for slot, _ in slots), *self._given])
        shared = [(slot, variable) for slot, variable in slots if key_of(variable) not in local]
        self._slots = [slot for slot, _ in shared]
        self.shared = [variable for _, variable in shared]
        form_of = _backends.active().form_of
        found = [self._given.get(slot, (None,))[0] for slot in self._slots]
        self.forms = tuple(None if gradient is None else form_of(gradient) for gradient in found)
        self.names = tuple(map(variable_name, self.shared))
        self.keys = variable_keys(self.names, model)

    def completed(self, forms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns gradients and variables, with zeros for gradients that only others have."""
        backend, pairs = _backends.active(), self._given.copy()
        for slot, variable, own, form in zip(
            self._slots, self.shared, self.forms, forms, strict=True
        ):
            gradient, given = pairs.get(slot, (None, variable))
            if own is None and form is not None:
                pairs[slot] = backend.zeros(variable, form), given
            elif own != form:
                pairs[slot] = backend.as_dense([gradient])[0], given
        ordered = [pairs[slot] for slot in self._order if slot in pairs]
        return [gradient for gradient, _ in ordered], [variable for _, variable in ordered]


def key_of(variable: Any) -> int:
    """Returns what tells variables apart; a Keras variable is the framework's, which it holds."""
    holds = isinstance(variable, keras.Variable) and keras.backend.backend() != "jax"
    return id(variable.value if holds else variable)


@functools.lru_cache(maxsize=64)
def variable_keys(paths: Sequence[str], model: str = "") -> tuple[str, ...]:
    """Returns a key for each variable; automatic numbers count from the first of the model."""
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
