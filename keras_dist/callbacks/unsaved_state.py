"""Callbacks of users that keep state which a backup cannot hold: found by looking at attributes."""

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist.callbacks.callback_states import attributes_of, keeps_itself

__all__ = ["UnsavedState"]

KNOWN = ("keras.", "keras_dist.")
FRAMEWORKS = ("keras", "tensorflow", "torch", "jax")
DEPTH = 4  # of objects in objects
LARGE_NBYTES, LARGE_COUNT = 1 << 20, 1000  # of what is larger the ends are looked at

_log = logging.getLogger("keras_dist")


class UnsavedState:
    """Names callbacks whose attributes change within an epoch, each once.

    What `on_epoch_begin` sets is left alone: a resumed run sets it as well.

    Args:
        callbacks: those that act on this rank, by name.
    """

    def __init__(self, callbacks: Mapping[str, keras.callbacks.Callback]):
        self._watched = {name: one for name, one in callbacks.items() if _may_forget(one)}
        self._before: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Looks at the attributes at the begin of an epoch."""
        self._before = {name: _attributes(one) for name, one in self._watched.items()}

    def end(self) -> None:
        """Looks again, and says which of them have changed."""
        for name, before in self._before.items():
            callback = self._watched[name]
            now = _attributes(callback)
            changed = [key for key in now if key not in before or now[key] != before[key]]
            if changed:
                del self._watched[name]
                _log.warning(
                    "keras_dist: a backup does not hold the state of the callback %s (%s), which "
                    "begins anew when training is resumed. Give it state_dict() and "
                    "load_state_dict(state).",
                    type(callback).__name__,
                    ", ".join(changed),
                )
        self._before = {}


def _may_forget(callback: keras.callbacks.Callback) -> bool:
    return not type(callback).__module__.startswith(KNOWN) and not keeps_itself(callback)


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns what tells whether the attributes change that are the user's own."""
    left_out = attributes_of(callback) | _known_names(type(callback))
    mine = [(name, value) for name, value in vars(callback).items() if name not in left_out]
    found = {}
    for name, value in mine:
        with contextlib.suppress(Exception):  # a thread of the callback's may be writing to it
            found[name] = _print(value)
    return found


def _known_names(kind: type) -> set[str]:
    """Returns the attributes that classes above this one use, which are Keras' or ours."""
    found = {"params", "validation_data"}
    for above in kind.__mro__:
        if above.__module__.startswith(KNOWN):
            codes = [getattr(value, "__code__", None) for value in vars(above).values()]
            found.update(name for code in codes if code is not None for name in code.co_names)
    return found


def _print(value: Any, depth: int = DEPTH) -> Any:
    """Returns what is equal as long as a value does not change."""
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | None):
        return repr(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return id(value), value.shape
        return value.shape, hashlib.blake2b(np.ascontiguousarray(_seen_of(value)).data).digest()
    if depth == 0:
        return id(value)
    if isinstance(value, dict):
        items = _ends(list(value.items()))
        return len(value), [(repr(key), _print(inner, depth - 1)) for key, inner in items]
    if isinstance(value, list | tuple):
        return len(value), [_print(inner, depth - 1) for inner in _ends(value)]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if callable(value) or type(value).__module__.startswith(FRAMEWORKS):
        return id(value)
    return id(value), _print(getattr(value, "__dict__", None), depth - 1)


def _seen_of(array: np.ndarray) -> np.ndarray:
    if array.nbytes <= LARGE_NBYTES:
        return array
    return np.concatenate([array.flat[:LARGE_COUNT], array.flat[-LARGE_COUNT:]])


def _ends(values: Any) -> Any:
    if len(values) <= LARGE_COUNT:
        return values
    return [*values[: LARGE_COUNT // 2], *values[-LARGE_COUNT // 2 :]]
