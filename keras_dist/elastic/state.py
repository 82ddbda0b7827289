"""What a training has come to: kept in memory, equal on all ranks, and in a directory if wanted.

A directory holds JSON and arrays, nothing that is executed.
"""

import copy
import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.elastic.running import HostsUpdatedInterrupt
from keras_dist.storage import versioned_backups
from keras_dist.storage.retry_policy import RetryPolicy
from keras_dist.storage.root_action import on_root

ABOUT = "about"
WRITE = "to write a state into"
ROOM = "Make room on its disk, or name another directory."


class State:
    """Base class of states: `ObjectState`, `KerasState`, `TorchState`.

    A custom class defines `save`, `restore` and `sync`, and `reset` if needed.

    Args:
        bcast_object: accepted for scripts of Horovod; ignored.
        get_rank: accepted for scripts of Horovod; ignored.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._losses = runtime.communicator().faults.losses

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions without arguments to call when the ranks have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset`, then the reset callbacks, in their order."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and checks whether ranks have died.

        A full disk does not end the training, nor does any failure to write after the first
        successful commit: rank 0 logs a warning, and the existing files stay.

        Collective: every rank; blocks if the job continues without ranks that die, or if there is
        a directory.

        Raises:
            HostsUpdatedInterrupt: ranks have died since the last commit; raised on every rank.
            CheckpointError: no commit could be written to the directory; raised on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Checks whether ranks have died since the last check.

        Collective: every rank; blocks if the job continues without ranks that die.

        Raises:
            HostsUpdatedInterrupt: ranks have died; raised on every rank.
        """
        comm = runtime.communicator()
        if comm.faults.retry is None:
            return
        # Ranks may notice a death at different times; the gathered values are the same on all.
        losses = _engine.collectives.allgather_object(
            comm, comm.faults.losses - self._losses, operation="the check whether ranks have died"
        )
        self._losses = comm.faults.losses
        if any(losses):
            text = f"{runtime.where()} Ranks have died; {comm.size} continue."
            raise HostsUpdatedInterrupt(text=text)

    def reset(self) -> None:
        """Does nothing. A custom class may adapt to the current ranks here."""

    def save(self) -> None:
        """Saves the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0. Collective: every rank; blocks."""
        raise NotImplementedError


class ObjectState(State):
    """A state of named values, which are its attributes.

    Args:
        bcast_object: accepted for scripts of Horovod; ignored.
        get_rank: accepted for scripts of Horovod; ignored.
        directory: directory to which rank 0 also writes commits, so that a restarted job continues
            from the last one. The values must be JSON values: numbers, strings, lists, and dicts
            with string keys; tuples are restored as lists, numpy scalars as Python numbers.
            Defaults to `None`: memory only.
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
            text = errors.explain(runtime.where(), expected, repr(bcast_object), remedy)
            raise errors.ArgumentTypeError(text)
        self._directory = None if directory is None else pathlib.Path(directory)
        self._retry_policy = RetryPolicy()
        self._names = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._keep()

    def save(self) -> None:
        """Saves the state in memory, and to the directory if there is one with free space.

        Raises:
            ArgumentTypeError: there is a directory, and a value is not a JSON value or a
                `state_dict` cannot be read without executing code.
            CheckpointError: as for `commit`.
        """
        self._gather()
        self._keep()
        if self._directory is not None:
            with _engine.collectives.raise_on_all(runtime.communicator(), "a commit", WRITE):
                text = self._as_json()
                self._check()
            write = functools.partial(self._add, self._directory, text)
            self._on_root(write, WRITE, ROOM)

    def restore(self) -> None:
        """Restores the last commit."""
        self._put(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Broadcasts the state of rank 0, at the first call the newest one in the directory.

        If the newest file is damaged, the one before is used, and rank 0 logs a warning.

        Collective: every rank; blocks.

        Raises:
            CheckpointError: no file can be read, or all are damaged; raised on every rank.
        """
        if self._directory is not None:
            read = functools.partial(self._read, self._directory)
            self._on_root(read, "to read the newest state in", versioned_backups.REMEDY)
            self._directory_is_read = True
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

    def _on_root(self, work: Callable[[], Any], what: str, remedy: str) -> None:
        def run() -> None:
            work()

        expected = f"{what} {self._directory}"
        on_root(0, what, run, errors.CheckpointError, expected, remedy)

    def _as_json(self) -> str:
        pairs = [f'"{name}": {_json_of(name, value)}' for name, value in self._kept[0].items()]
        return f"{{{', '.join(pairs)}}}"

    def _add(self, directory: pathlib.Path, text: str) -> None:
        def write() -> bool:
            save = functools.partial(self._write, text)
            self._whole = versioned_backups.add(directory, save, self._whole)
            return True

        self._retry_policy.attempt(write, f"{WRITE} {directory}")

    def _write(self, text: str, file: BinaryIO) -> None:
        everything: dict[str, Any] = {ABOUT: np.array(text), **self._without_own(self._kept[1])}
        np.savez(file, **everything)

    _directory_is_read = False
    _whole: pathlib.Path | None = None  # on rank 0: the last intact file

    def _read(self, directory: pathlib.Path) -> None:
        if self._directory_is_read:
            return
        self._whole = versioned_backups.newest_intact(directory)
        if self._whole is not None:
            with np.load(self._whole, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files if name != ABOUT}
                self._put((json.loads(str(file[ABOUT])), arrays), of_file=True)


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
