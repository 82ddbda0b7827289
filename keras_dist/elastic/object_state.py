"""What a training has come to: kept in memory, equal on all ranks, and in a directory if wanted.

Commits hold JSON and arrays: reading them executes no code.
"""

import copy
import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from keras_dist import _engine, config, errors, runtime
from keras_dist.elastic.running import State
from keras_dist.resume import format
from keras_dist.resume.memory import MemoryCopies
from keras_dist.resume.read import bytes_by_name
from keras_dist.resume.tensor_file import Tensor
from keras_dist.storage.root_action import RetryPolicy, on_root

WRITE = "to write a state into"
ROOM = "Make room on its disk, or name another directory."

Value = TypeVar("Value")

_log = logging.getLogger("keras_dist")
_numbers = itertools.count()  # of states, the same on every rank and at every start of the job


class ObjectState(State):
    """A state of named values, which are its attributes.

    Args:
        bcast_object: accepted for scripts of Horovod; ignored.
        get_rank: accepted for scripts of Horovod; ignored.
        directory: directory to which rank 0 also writes commits, so that a restarted job continues
            from the last one. The values must be JSON values: numbers, strings, lists, and dicts
            with string keys; tuples are restored as lists, numpy scalars as Python numbers.
            Defaults to `None`: memory only. A job that `keras-dist run` restarts continues from
            memory, if the values are such values.
        **attributes: initial values, by name.

    Raises:
        ArgumentTypeError: `bcast_object` is not a function: pass a directory as `directory=`.

    Example:
    ```python
    state = keras_dist.elastic.ObjectState(epoch=0, best=None)
    state.epoch += 1
    state.commit()
    ```
    """

    def __init__(
        self,
        bcast_object: Any = None,
        get_rank: Any = None,
        directory: Any = None,
        **attributes: Any,
    ):
        super().__init__()
        if bcast_object is not None and not callable(bcast_object):
            expected = "bcast_object to be a function, as in Horovod's scripts"
            remedy = "Leave it out; pass a directory as directory=."
            raise errors.ArgumentTypeError(expected, repr(bcast_object), remedy)
        self._directory = None if directory is None else pathlib.Path(directory)
        self._number = next(_numbers)
        self._retry_policy = RetryPolicy()
        self._names = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._keep()

    def save(self) -> None:
        """Saves the state in memory, and to the directory if there is one with free space.

        Collective: every rank; blocks if the job may be started again, or if there is a directory.

        Raises:
            ArgumentTypeError: there is a directory, and a value is not a JSON value or a
                `state_dict` cannot be read without executing code.
            CheckpointError: as for `commit`.
        """
        self._gather()
        self._keep()
        if self._directory is not None:
            with _engine.collectives.raise_on_all(runtime.communicator(), "a commit", WRITE):
                self._check_all()
        number = self._write_copies()
        if self._directory is not None:
            add = functools.partial(self._add, self._directory, number)
            self._on_root(add, WRITE, ROOM)

    def restore(self) -> None:
        """Restores the last commit."""
        self._put(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Broadcasts the state of rank 0, at the first call the newest one that was committed.

        That is one in the directory, or of an earlier start of the job in memory. If the newest
        file is damaged, the one before is used, and rank 0 logs a warning.

        Collective: every rank; blocks.

        Raises:
            CheckpointError: no file can be read, or all are damaged; raised on every rank.
        """
        if self._copies is None:
            self._find()
        self._gather()
        comm = runtime.communicator()
        values, arrays = self._current()
        shared = values, self._without_own(arrays)
        self._put(
            _engine.collectives.broadcast_object(
                comm, shared, 0, "the state of an elastic training"
            )
        )
        self._keep()

    def _how_to_go_on(self) -> str:
        if self._directory is not None:
            return super()._how_to_go_on()
        return "Only this keras-dist run can go on from it, on other hosts: pass directory=."

    def _outlives_ranks(self) -> bool:
        return self._directory is not None or self._is_in_memory

    def _forget(self) -> None:
        if self._copies is not None:
            self._copies.remove()

    def _gather(self) -> None:
        """Merges values that differ between ranks."""

    def _arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the state, besides its attributes."""
        return {}

    def _without_own(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays that are equal on all ranks."""
        return arrays

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        pass

    def _check(self) -> None:
        """Checks that a directory can restore `_arrays`."""

    def _current(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {name: getattr(self, name) for name in self._names}, self._arrays()

    def _keep(self) -> None:
        self._kept = copy.deepcopy(self._current())

    def _put(
        self, kept: tuple[dict[str, Any], dict[str, np.ndarray]], of_file: bool = False
    ) -> None:
        for name, value in kept[0].items():
            setattr(self, name, value)
        self._put_arrays(kept[1], of_file)

    def _on_root(self, work: Callable[[], Value], what: str, remedy: str) -> Value:
        expected = f"{what} {self._directory or 'memory'}"
        return on_root(0, what, work, errors.CheckpointError, expected, remedy)

    def _check_all(self) -> None:
        plain_values(self._kept[0])
        self._check()

    def _add(self, directory: pathlib.Path, number: int | None) -> None:
        with self._retry_policy.attempt(f"{WRITE} {directory}"):
            tensors, about = self._contents()
            path = format.write(directory, tensors, about, self._previous, number)
            self._previous = format.number_of(path)
            self._retry_policy.succeed()

    def _contents(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Returns what a generation is made of: arrays, and what its manifest says."""
        arrays = self._without_own(self._kept[1]).items()
        tensors = [Tensor(name, "uint8", array.data) for name, array in arrays]
        return tensors, plain_values(self._kept[0])

    def _write_copies(self) -> int | None:
        """Writes a commit into memory; returns its number, or `None` if there are no copies."""
        if self._copies is None or not self._is_in_memory:
            return None
        following = functools.partial(self._next_number, self._copies)
        number = self._on_root(following, WRITE, ROOM)
        if number is not None:
            given = self._contents() if runtime.rank() == 0 else ([], {})
            self._copies.write(number, *given)
        return number

    def _next_number(self, copies: MemoryCopies) -> int | None:
        try:
            plain_values(self._kept[0])
        except errors.ArgumentTypeError as error:  # of a value that was set after the first `sync`
            _log.warning("%s Training continues without a copy in memory.", error)
            return None
        return copies.next_number()

    _copies: MemoryCopies | None = None  # from the first `sync` on
    _is_in_memory = False
    _previous: int | None = None  # on rank 0: number of the last intact generation

    def _find(self) -> None:
        """Reads the newest commit. Collective: every rank; blocks."""
        self._keep()
        self._is_in_memory = self._on_root(self._fits_in_memory, WRITE, ROOM)
        place = self._directory or pathlib.Path("keras_dist.elastic", str(self._number))
        self._copies = copies = MemoryCopies(place, 0, self._is_in_memory)
        read = functools.partial(self._read, copies, copies.find())
        what = "to read the newest state in"
        self._is_found = self._on_root(read, what, format.REMEDY)

    def _fits_in_memory(self) -> bool:
        """Returns whether a further start of the job can read this state from memory."""
        settings = config.settings()
        if not (settings.starts_again and settings.job_id):
            return False
        try:
            self._check_all()
        except errors.ArgumentTypeError as error:
            if self._directory is None:
                _log.warning("%s Otherwise a job that is started again begins anew.", error)
            return False
        return True

    def _read(self, copies: MemoryCopies, copy: pathlib.Path | None) -> bool:
        contents = copies.newest(copy)
        if contents is None:
            return False
        self._previous = copies.number = format.number_of(contents.generation.path)
        [part] = contents.generation.parts
        self._put((dict(contents.about), bytes_by_name(part)), of_file=True)
        return True


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns named values as JSON restores them."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = _plain(value)
        except (TypeError, ValueError, RecursionError) as error:
            expected = f"{name} to be a JSON value, in a state with a directory"
            remedy = "Keep only numbers, strings, lists and dicts with string keys in it."
            raise errors.ArgumentTypeError(expected, str(error), remedy) from None
    return found


def _plain(value: Any) -> Any:
    """Returns a value as JSON restores it; refuses values that it would not."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):  # JSON would convert it to a string
                raise TypeError(f"a dictionary with the key {key!r}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, int):
        str(value)  # refuses those of too many digits, as JSON would when the state is written
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__}")
