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

__all__ = ["ObjectState", "State"]

ABOUT = "about"
WRITE = "to write a state into"
ROOM = "Make room on its disk, or name another directory."


class State:
    """The state of a training; `ObjectState`, `KerasState` and `TorchState` say of what.

    A class of the user's own has `save`, `restore` and `sync`, and `reset` if it needs it.

    Args:
        bcast_object: of Horovod's scripts; ignored.
        get_rank: of Horovod's scripts; ignored.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._losses = runtime.communicator().faults.losses

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions without arguments, called when the ranks are others than before."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset`, then the reset callbacks, in their order."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keeps the state as it is, and looks whether the ranks are those from before.

        A disk that is full does not end the training, nor does any failure to write after a first
        commit that was written: the root says so, and the files that are there stay.

        Collective: every rank, at the same place; blocks where ranks may die, or there is a
        directory.

        Raises:
            HostsUpdatedInterrupt: ranks have died since the last commit; raised on every rank.
            CheckpointError: the directory could not be written to at all; raised on every rank.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Looks whether ranks have died since this was last asked.

        Collective: every rank, at the same place; blocks where ranks may die.

        Raises:
            HostsUpdatedInterrupt: they have; raised on every rank.
        """
        comm = runtime.communicator()
        if comm.faults.retry is None:
            return
        # One rank may hear of a death before another; what they gather is the same on all.
        told = _engine.collectives.allgather_object(
            comm, comm.faults.losses - self._losses, operation="asking whether ranks have died"
        )
        self._losses = comm.faults.losses
        if any(told):
            text = f"{runtime.where()} Ranks have died; {comm.size} go on."
            raise HostsUpdatedInterrupt(text=text)

    def reset(self) -> None:
        """Does nothing: a class of the user's own prepares itself here for the ranks there are."""

    def save(self) -> None:
        """Keeps the state as it is."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of the root. Collective: every rank; blocks."""
        raise NotImplementedError


class ObjectState(State):
    """A state of named values, which are its attributes.

    Args:
        bcast_object: of Horovod's scripts; ignored.
        get_rank: of Horovod's scripts; ignored.
        directory: where commits are also written, by the root, so that a job that is started anew
            goes on from the last one. The values must then be such as JSON has: numbers, strings,
            lists, and dictionaries whose keys are strings; tuples come back as lists, numbers of
            numpy as Python's. Defaults to `None`: in memory alone.
        **attributes: the values, by their names.

    Raises:
        ArgumentTypeError: `bcast_object` is no function: what a directory is, has to be named.

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
            remedy = "Leave it out; a directory is passed by its name, directory=."
            text = errors.explain(runtime.where(), expected, repr(bcast_object), remedy)
            raise errors.ArgumentTypeError(text)
        self._directory = None if directory is None else pathlib.Path(directory)
        self._retry_policy = RetryPolicy()
        self._names = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._keep()

    def save(self) -> None:
        """Keeps the state in memory, and in the directory if there is one and it has room.

        Raises:
            ArgumentTypeError: a value is none that JSON gives back, or a part of torch is none that
                can be read without executing anything, and there is a directory.
            CheckpointError: as of `commit`.
        """
        self._gather()
        self._keep()
        if self._directory is not None:
            with _engine.collectives.raise_on_all(runtime.communicator(), "a commit"):
                text = self._as_json()
                self._check()
            write = functools.partial(self._add, self._directory, text)
            self._on_root(write, WRITE, ROOM)

    def restore(self) -> None:
        """Goes back to the last commit."""
        self._put(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Gives all ranks the state of the root: at first what it finds in the directory.

        A newest file that is damaged is noticed and the one before is used, which the root says.

        Collective: every rank; blocks.

        Raises:
            CheckpointError: what is there cannot be read, or none of it is whole; raised on every
                rank.
        """
        if self._directory is not None:
            read = functools.partial(self._read, self._directory)
            self._on_root(read, "to read the newest state in", versioned_backups.REMEDY)
            self._directory_is_read = True
        self._gather()
        comm = runtime.communicator()
        values, arrays = self._kept_now()
        shared = values, self._without_own(arrays)
        self._put(
            _engine.collectives.broadcast_object(
                comm, shared, 0, "the state of an elastic training"
            )
        )
        self._keep()

    def _gather(self) -> None:
        """Puts together what each rank knows by itself."""

    def _arrays(self) -> dict[str, np.ndarray]:
        """Returns what there is besides the attributes."""
        return {}

    def _without_own(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns those of the arrays that are one for all ranks."""
        return arrays

    def _put_arrays(self, arrays: dict[str, np.ndarray], of_file: bool = False) -> None:
        pass

    def _check(self) -> None:
        """Raises an error where a directory could not give back what `_arrays` were."""

    def _kept_now(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {name: getattr(self, name) for name in self._names}, self._arrays()

    def _keep(self) -> None:
        self._kept = copy.deepcopy(self._kept_now())

    def _put(
        self, kept: tuple[dict[str, Any], dict[str, np.ndarray]], of_file: bool = False
    ) -> None:
        for name, value in kept[0].items():
            setattr(self, name, value)
        self._put_arrays(kept[1], of_file)

    def _on_root(self, work: Callable[[], Any], what: str, remedy: str) -> None:
        def quietly() -> None:
            work()

        expected = f"{what} {self._directory}"
        on_root(0, what, quietly, errors.CheckpointError, expected, remedy)

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
    _whole: pathlib.Path | None = None  # on the root: the last file that is known to be

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
        expected = f"{name} to be a value that JSON has, in a state with a directory"
        remedy = "Keep numbers, strings, lists and dictionaries of them, by strings, in it."
        raise errors.ArgumentTypeError(
            errors.explain(runtime.where(), expected, str(error), remedy)
        ) from None


def _plain(value: Any) -> Any:
    """Returns a value as JSON gives it back; what would become another is refused."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):  # JSON would make a string of it
                raise TypeError(f"a dictionary with the key {key!r}")
        return {key: _plain(one) for key, one in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__}")
