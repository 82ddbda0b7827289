"""Detection of user callbacks whose state a backup does not include, by attribute changes."""

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist.callbacks.callback_states import attributes_of, has_state_dict

KNOWN = ("keras.", "keras_dist.")
FRAMEWORKS = ("keras", "tensorflow", "torch", "jax")
DEPTH = 4  # maximum nesting of compared objects
LARGE_NBYTES, LARGE_COUNT = 1 << 20, 1000  # only the ends of larger values are compared

_log = logging.getLogger("keras_dist")


class UnsavedState:
    """Warns of callbacks whose attributes change within an epoch, once per callback.

    Attributes that `on_epoch_begin` sets do not count: a resumed run sets them again.
    """

    def __init__(self, callbacks: Mapping[str, keras.callbacks.Callback]):
        self._watched = {name: c for name, c in callbacks.items() if _may_lose_state(c)}
        self._before: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Records the attributes at the beginning of an epoch."""
        self._before = {name: _attributes(c) for name, c in self._watched.items()}

    def end(self) -> None:
        """Warns of attributes that have changed since `begin`."""
        for name, before in self._before.items():
            callback = self._watched[name]
            now = _attributes(callback)
            changed = [key for key in now if key not in before or now[key] != before[key]]
            if changed:
                del self._watched[name]
                _log.warning(
                    "keras_dist: a backup does not hold the state of the callback %s (%s), which "
                    "restarts when training resumes. Add the methods state_dict() and "
                    "load_state_dict(state) to it.",
                    type(callback).__name__,
                    ", ".join(changed),
                )
        self._before = {}


def _may_lose_state(callback: keras.callbacks.Callback) -> bool:
    return not type(callback).__module__.startswith(KNOWN) and not has_state_dict(callback)


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns fingerprints of the attributes that the user's class defines, by name."""
    left_out = attributes_of(callback) | _known_names(type(callback))
    own = [(name, value) for name, value in vars(callback).items() if name not in left_out]
    fingerprints = {}
    for name, value in own:
        with contextlib.suppress(Exception):  # a thread of the callback may modify the value
            fingerprints[name] = _fingerprint(value)
    return fingerprints


def _known_names(kind: type) -> set[str]:
    """Returns the attributes that base classes of Keras and of this package use."""
    names = {"params", "validation_data"}
    for base in kind.__mro__:
        if base.__module__.startswith(KNOWN):
            codes = [getattr(value, "__code__", None) for value in vars(base).values()]
            names.update(name for code in codes if code is not None for name in code.co_names)
    return names


def _fingerprint(value: Any, depth: int = DEPTH) -> Any:
    """Returns an object that compares equal as long as the value does not change."""
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | None):
        return repr(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return id(value), value.shape
        return value.shape, hashlib.blake2b(np.ascontiguousarray(_sampled(value)).data).digest()
    if depth == 0:
        return id(value)
    if isinstance(value, dict):
        items = _ends(list(value.items()))
        return len(value), [(repr(key), _fingerprint(inner, depth - 1)) for key, inner in items]
    if isinstance(value, list | tuple):
        return len(value), [_fingerprint(inner, depth - 1) for inner in _ends(value)]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if callable(value) or type(value).__module__.startswith(FRAMEWORKS):
        return id(value)
    return id(value), _fingerprint(getattr(value, "__dict__", None), depth - 1)


def _sampled(array: np.ndarray) -> np.ndarray:
    if array.nbytes <= LARGE_NBYTES:
        return array
    return np.concatenate([array.flat[:LARGE_COUNT], array.flat[-LARGE_COUNT:]])


def _ends(values: Any) -> Any:
    if len(values) <= LARGE_COUNT:
        return values
    return [*values[: LARGE_COUNT // 2], *values[-LARGE_COUNT // 2 :]]
