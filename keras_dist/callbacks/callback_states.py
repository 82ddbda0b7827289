"""The states of callbacks: what Keras' callbacks and those of users keep from one hook to the next.

Ranks may have different callbacks. A callback is known by its class and by which of that class it
is in the list; one in `RootOnly` counts as the callback itself, on the rank where it acts.
"""

import collections
import functools
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist._compat.keras.callbacks import STATE_ATTRIBUTES
from keras_dist.callbacks.nested_values import pack
from keras_dist.callbacks.root import RootOnly

__all__ = [
    "acting",
    "append_to_files",
    "attributes_of",
    "keeps_itself",
    "own_states",
    "restore",
    "shared_states",
    "with_files_of",
]

ATTRIBUTES, USERS, FILE = "attributes", "state_dict", "file"

State = dict[str, Any]

_log = logging.getLogger("keras_dist")


def acting(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    """Returns the callbacks that act on this rank, by the name that they have on every rank."""
    seen: collections.Counter[str] = collections.Counter()
    found = {}
    for callback in callbacks:
        inner, acts = _inside(callback)
        kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
        if acts:
            found[f"{kind} {seen[kind]}"] = inner
        seen[kind] += 1
    return found


def keeps_itself(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback offers `state_dict()` and `load_state_dict()`."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in methods)


def shared_states(callbacks: Mapping[str, keras.callbacks.Callback]) -> dict[str, State]:
    """Returns what Keras' callbacks keep, by name, which is alike on all ranks."""
    found = {}
    for name, callback in callbacks.items():
        # Some attributes are not there before the first hook that sets them.
        names = sorted(attributes_of(callback) & vars(callback).keys())
        names = [one for one in names if _can_be_kept(callback, one)]
        if names:
            found[name] = {ATTRIBUTES: {one: vars(callback)[one] for one in names}}
    return found


def own_states(
    callbacks: Mapping[str, keras.callbacks.Callback], on_root: Iterable[str]
) -> dict[str, State]:
    """Returns the states that each rank has of its own, by name.

    Those are what users' callbacks give, as batches have other logs on each rank, the ends of its
    files, and the states of callbacks that the root does not have.
    """
    of_root = set(on_root)
    states = shared_states({n: one for n, one in callbacks.items() if n not in of_root})
    for name, callback in callbacks.items():
        if keeps_itself(callback):
            states[name] = {**states.get(name, {}), USERS: _state_of(callback)}
        if isinstance(callback, keras.callbacks.CSVLogger):
            file = {"keys": callback.keys, "nbytes": _nbytes(callback)}
            states[name] = {**states.get(name, {}), FILE: file}
    return states


def attributes_of(callback: keras.callbacks.Callback) -> set[str]:
    """Returns the attributes that a class of Keras, of which a callback is one, keeps."""
    classes = {kind: getattr(keras.callbacks, kind) for kind in STATE_ATTRIBUTES}
    ours = [
        names for kind, names in STATE_ATTRIBUTES.items() if isinstance(callback, classes[kind])
    ]
    return {name for names in ours for name in names}


def append_to_files(callbacks: Mapping[str, keras.callbacks.Callback]) -> list[Any]:
    """Keeps `on_train_begin` from emptying files; returns the callbacks that would have."""
    loggers = [one for one in callbacks.values() if isinstance(one, keras.callbacks.CSVLogger)]
    emptying = [one for one in loggers if not one.append]
    for logger in emptying:
        logger.append = True
    return emptying


def restore(callbacks: Mapping[str, keras.callbacks.Callback], states: Mapping[str, State]) -> None:
    """Gives callbacks their states, those of them that have one."""
    for name, callback in callbacks.items():
        state = states.get(name, {})
        for attribute, value in state.get(ATTRIBUTES, {}).items():
            setattr(callback, attribute, value)
        if FILE in state:
            _restore_file(callback, **state[FILE])
        if USERS in state and keeps_itself(callback):
            _restore_own(callback, state[USERS])


def with_files_of(states: Mapping[str, State], others: Mapping[str, State]) -> dict[str, State]:
    """Returns states of callbacks with what other ones say of their files, or nothing of them."""
    files = {name: {FILE: state[FILE]} for name, state in others.items() if FILE in state}
    return {
        name: {key: value for key, value in state.items() if key != FILE} | files.get(name, {})
        for name, state in states.items()
    }


def _inside(callback: keras.callbacks.Callback) -> tuple[keras.callbacks.Callback, bool]:
    """Returns the callback that `RootOnly` holds, or itself, and whether it acts on this rank."""
    if not isinstance(callback, RootOnly):
        return callback, True
    inner, acts = _inside(callback.callback)
    return inner, acts and runtime.rank() == callback.root_rank


def _can_be_kept(callback: keras.callbacks.Callback, attribute: str) -> bool:
    """Tells whether a backup can hold an attribute, such as a history of users' logs."""
    try:
        pack(vars(callback)[attribute], [])
    except TypeError as error:
        _say_once(type(callback).__name__, attribute, str(error))
        return False
    return True


@functools.cache
def _say_once(kind: str, attribute: str, why: str) -> None:
    _log.warning(
        "keras_dist: a backup does not hold %s.%s, in which there is %s: it begins anew when "
        "training is resumed.",
        kind,
        attribute,
        why,
    )


def _state_of(callback: Any) -> Any:
    """Returns what a user's callback gives for a backup.

    Raises:
        CheckpointError: it fails, or gives what a backup cannot hold.
    """
    try:
        given = callback.state_dict()
        pack(given, [])
    except Exception as error:  # other ranks wait to hear of it
        raise errors.CheckpointError(
            errors.explain(
                runtime.where(),
                f"{type(callback).__name__}.state_dict() to give JSON values, numpy arrays and "
                "tensors, in dicts, lists and tuples",
                f"{type(error).__name__}: {error}",
                "Return nothing else from it.",
            )
        ) from error
    return given


def _restore_own(callback: Any, state: Any) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:  # other ranks wait to hear of it
        raise errors.CheckpointError(
            errors.explain(
                runtime.where(),
                f"{type(callback).__name__}.load_state_dict() to take what state_dict() gave",
                f"{type(error).__name__}: {error}",
                "Make it do so, or remove the backup to begin anew.",
            )
        ) from error


def _nbytes(logger: Any) -> int | None:
    try:
        return os.path.getsize(logger.filename)
    except OSError:
        return None  # no local file


def _restore_file(logger: Any, keys: list[str] | None, nbytes: int | None) -> None:
    """Cuts off the rows of epochs that are trained once more."""
    logger.keys = keys
    found = _nbytes(logger)
    if nbytes is None or found is None:
        return
    if found > nbytes:
        os.truncate(logger.filename, nbytes)
    elif found < nbytes:
        _log.warning(
            "%s has %d bytes. It had %d when the backup was written: rows are missing.",
            logger.filename,
            found,
            nbytes,
        )
    logger.append_header = min(found, nbytes) == 0
