"""What a backup holds of a fit beside its model: the states of its callbacks and of its ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.callbacks import callback_states, rank_states
from keras_dist.callbacks.nested_values import pack, unpack

__all__ = ["FitState", "Packed", "read", "write"]

# JSON, and the bytes of the arrays in it.
Packed = tuple[Any, list[np.ndarray]]

# In the JSON of a backup; of the names of its arrays.
FIT, ARRAY = "fit", "fit {part} {number}"
CALLBACKS = "callbacks"


class FitState:
    """The states of the callbacks and of the ranks of one fit.

    Args:
        callbacks: all callbacks of the fit.
        root_rank: the rank whose callbacks count for all.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback], root_rank: int):
        self._every = list(callbacks)
        self._root_rank = root_rank
        self._on_root: list[str] = []
        self._emptying: list[Any] = []
        self._shared: Packed | None = None
        self._ranks: list[Packed] = []

    @property
    def callbacks(self) -> Mapping[str, keras.callbacks.Callback]:
        """The callbacks that act on this rank, by name; more of them where ranks have died."""
        return callback_states.acting(self._every)

    def agree(self, resumes: bool) -> None:
        """Learns which callbacks the root has. Collective: every rank.

        Args:
            resumes: whether there is a backup, so that files are to be kept.
        """
        comm, names = runtime.communicator(), list(self.callbacks)
        self._on_root = _engine.collectives.broadcast_object(
            comm, names, self._root_rank, "the callbacks of the root"
        )
        self._emptying = callback_states.append_to_files(self.callbacks) if resumes else []

    def gather(self, model: keras.Model, logs: dict[str, Any]) -> list[Packed]:
        """Returns the states of all ranks. Collective: every rank; blocks.

        Raises:
            CheckpointError: a user's callback fails in `state_dict`, or gives what a backup cannot
                hold; raised on every rank.
        """

        def mine() -> Packed:
            state = rank_states.state(model, logs)
            state[CALLBACKS] = callback_states.own_states(self.callbacks, self._on_root)
            return _packed(state)

        return _together(mine, "the states of ranks for a backup")

    def of_callbacks(self) -> Packed:
        """Returns the states of Keras' callbacks of this rank."""
        return _packed(callback_states.shared_states(self.callbacks))

    def found(self, parts: Sequence[Packed]) -> None:
        """Notes what `read` has found in a backup, which may be nothing."""
        self._shared, self._ranks = (parts[0], list(parts[1:])) if parts else (None, [])

    def ranks(self) -> list[rank_states.RankState]:
        """Returns the states of all ranks in the backup."""
        return [unpack(*packed) for packed in self._ranks]

    def restore_callbacks(self) -> None:
        """Gives callbacks what the backup has of them. Collective: every rank; blocks.

        Raises:
            CheckpointError: a user's callback fails in `load_state_dict`; raised on every rank.
        """
        for logger in self._emptying:
            logger.append = False
        if self._shared is not None:
            _together(self._restore, "the states of callbacks from a backup")

    def _restore(self) -> None:
        states = unpack(*self._shared)  # type: ignore[misc]
        for name, state in self._own().items():
            states[name] = {**states.get(name, {}), **state}
        callback_states.restore(self.callbacks, states)

    def _own(self) -> dict[str, Any]:
        """Returns the states in the backup that are this rank's own."""
        ranks, rank = self.ranks(), runtime.rank()
        own: dict[str, Any] = rank_states.of_rank(ranks)[CALLBACKS]
        if len(ranks) == runtime.size():
            return own
        # Where a file ends on one rank says nothing of that of another.
        mine = ranks[rank][CALLBACKS] if rank < len(ranks) else {}
        return callback_states.with_files_of(own, mine)


def write(parts: Sequence[Packed], about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Adds what has been packed to the JSON and the arrays of a backup."""
    about[FIT] = [json for json, _ in parts]
    for part, (_, packed) in enumerate(parts):
        for number, array in enumerate(packed):
            arrays[ARRAY.format(part=part, number=number)] = array


def read(about: Mapping[str, Any], file: Mapping[str, np.ndarray]) -> list[Packed]:
    """Returns what `write` has added; nothing from a backup of an earlier version."""
    found: list[Packed] = []
    for part, json in enumerate(about.get(FIT, ())):
        arrays: list[np.ndarray] = []
        while (name := ARRAY.format(part=part, number=len(arrays))) in file:
            arrays.append(file[name])
        found.append((json, arrays))
    return found


def _packed(states: Mapping[str, Any]) -> Packed:
    arrays: list[np.ndarray] = []
    return pack(dict(states), arrays), arrays


def _together(work: Callable[[], Any], operation: str) -> list[Any]:
    """Returns what came of some work on each rank; what fails on one is raised on all."""
    mine: Any
    try:
        mine = work()
    except errors.CheckpointError as error:
        mine = error
    everyone = _engine.collectives.allgather_object(
        runtime.communicator(), mine, operation=operation
    )
    failed = [one for one in everyone if isinstance(one, errors.CheckpointError)]
    if failed:
        raise failed[0]
    return everyone
