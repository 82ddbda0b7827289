"""States of Keras' and user callbacks, for generations.

Ranks may have different callbacks, which are matched by class and by position among those of that
class. `RootOnly` is transparent: the wrapped callback counts, on its rank.
"""

import collections
import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import STATE_ATTRIBUTES
from keras_dist.callbacks.root import unwrapped
from keras_dist.resume.state import own, pack

KNOWN = ("keras.", "keras_dist.")
ATTRIBUTES, USERS, FILE = "attributes", "state_dict", "file"
ACCEPTS = "load_state_dict() to accept the value of state_dict()"
FIX = "Fix load_state_dict, or remove the backup to train from the start."

State = dict[str, Any]
CSV_LOGGER = keras.callbacks.CSVLogger

_log = logging.getLogger("keras_dist")


class CallbackStates:
    """The states of the callbacks of one fit, see `resume.state.FitState`.

    Those of Keras' callbacks are equal on all ranks. Those of user callbacks, sizes of log files,
    and states of callbacks that the root does not have are of each rank.
    """

    key = "callbacks"

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback] = (), root_rank: int = 0):
        self._every, self._root_rank = list(callbacks), root_rank
        self._on_root: set[str] = set()
        self._appending: list[Any] = []
        self.of_all: Mapping[str, State] = {}

    def agree(self, resumes: bool) -> None:
        """Broadcasts the names of the callbacks of the root. Collective: every rank; blocks."""
        comm, names = runtime.fit_communicator(), list(acting(self._every))
        self._on_root = set(
            _engine.collectives.broadcast_object(
                comm, names, self._root_rank, "the callbacks of the root"
            )
        )
        if resumes:
            every = acting(self._every).values()
            loggers = [item for item in every if isinstance(item, CSV_LOGGER)]
            self._appending = [logger for logger in loggers if not logger.append]
            for logger in self._appending:
                logger.append = True  # until they have been called: they would empty their files

    def warn_of_unsaved(self) -> None:
        """Names the user callbacks that give no state."""
        every = acting(self._every).values()
        users = [item for item in every if not type(item).__module__.startswith(KNOWN)]
        found = [type(item).__name__ for item in users if not has_state_dict(item)]
        if found:
            _log.warning(
                "keras_dist: a backup does not hold the state of the callbacks %s. Where they have "
                "one that a resumed fit needs, add the methods state_dict() and "
                "load_state_dict(state).",
                ", ".join(found),
            )

    def give_all(self) -> dict[str, State]:
        return _states_of_keras(acting(self._every))

    def give(self) -> dict[str, State]:
        """Returns the states that differ between ranks by name."""
        mine = acting(self._every)
        states = _states_of_keras({n: item for n, item in mine.items() if n not in self._on_root})
        for name, callback in mine.items():
            if has_state_dict(callback):
                states[name] = {**states.get(name, {}), USERS: _state_of(callback)}
            if isinstance(callback, CSV_LOGGER):
                file = {"keys": callback.keys, "nbytes": _nbytes(callback)}
                states[name] = {**states.get(name, {}), FILE: file}
        return states

    def take(self, states: Sequence[Mapping[str, State]]) -> bool:
        """Restores the callbacks that have a state."""
        for logger in self._appending:
            logger.append = False
        found, rank = own(states), runtime.fit_rank()
        files = found
        if len(states) != runtime.fit_size():  # positions in files differ between ranks
            files = states[rank] if rank < len(states) else {}
        for name, callback in acting(self._every).items():
            state = {**self.of_all.get(name, {}), **found.get(name, {})}
            for attribute, value in state.get(ATTRIBUTES, {}).items():
                setattr(callback, attribute, value)
            if FILE in files.get(name, {}):
                _restore_file(callback, **files[name][FILE])
            if USERS in state and has_state_dict(callback):
                with _calling(callback, ACCEPTS, FIX):
                    callback.load_state_dict(state[USERS])
        return True


def acting(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    """Returns the callbacks that act on this rank, by a name that is equal on every rank."""
    seen: collections.Counter[str] = collections.Counter()
    found = {}
    for callback in callbacks:
        inner, acts = unwrapped(callback)
        kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
        if acts:
            found[f"{kind} {seen[kind]}"] = inner
        seen[kind] += 1
    return found


def has_state_dict(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback has the methods `state_dict` and `load_state_dict`."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in methods)


def _states_of_keras(callbacks: Mapping[str, keras.callbacks.Callback]) -> dict[str, State]:
    """Returns the states of Keras' callbacks by name."""
    found = {}
    for name, callback in callbacks.items():
        # Some attributes do not exist before the first hook that sets them.
        names = sorted(_attributes_of(callback) & vars(callback).keys())
        names = [item for item in names if _can_be_kept(callback, item)]
        if names:
            found[name] = {ATTRIBUTES: {item: vars(callback)[item] for item in names}}
    return found


def _attributes_of(callback: keras.callbacks.Callback) -> set[str]:
    """Returns the names of the attributes in the state of a callback of Keras."""
    classes = {kind: getattr(keras.callbacks, kind) for kind in STATE_ATTRIBUTES}
    kinds = [kind for kind in STATE_ATTRIBUTES if isinstance(callback, classes[kind])]
    return {name for kind in kinds for name in STATE_ATTRIBUTES[kind]}


def _can_be_kept(callback: keras.callbacks.Callback, attribute: str) -> bool:
    """Returns whether a backup can hold an attribute; a history may contain users' objects."""
    try:
        pack(vars(callback)[attribute], [])
    except TypeError as error:
        _warn_once(type(callback).__name__, attribute, str(error))
        return False
    return True


@functools.cache
def _warn_once(kind: str, attribute: str, why: str) -> None:
    _log.warning(
        "keras_dist: a backup does not hold %s.%s, which contains %s: it restarts when training "
        "resumes.",
        kind,
        attribute,
        why,
    )


@contextlib.contextmanager
def _calling(callback: Any, expected: str, remedy: str) -> Iterator[None]:
    """Explains an error of a user's method, which is raised on all ranks."""
    try:
        yield
    except Exception as error:
        received = f"{type(error).__name__}: {error}"
        expected = f"{type(callback).__name__}.{expected}"
        raise errors.CheckpointError(expected, received, remedy) from error


def _state_of(callback: Any) -> Any:
    expected = (
        "state_dict() to return JSON values, NumPy arrays and tensors, in dicts, lists and tuples"
    )
    with _calling(callback, expected, "Return values of these types only."):
        given = callback.state_dict()
        pack(given, [])
    return given


def _nbytes(logger: Any) -> int | None:
    try:
        return os.path.getsize(logger.filename)
    except OSError:
        return None  # no local file


def _restore_file(logger: Any, keys: list[str] | None, nbytes: int | None) -> None:
    """Truncates the rows of epochs that are repeated."""
    logger.keys = keys
    found = _nbytes(logger)
    if nbytes is None or found is None:
        return
    if found > nbytes:
        os.truncate(logger.filename, nbytes)
    elif found < nbytes:
        _log.warning(
            "keras_dist: %s has %d bytes, fewer than the %d when the backup was written: rows are "
            "missing.",
            logger.filename,
            found,
            nbytes,
        )
    logger.append_header = min(found, nbytes) == 0
