"""The state of a fit in a backup, besides the model: its callbacks and its ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, runtime
from keras_dist.callbacks import callback_states, rank_states
from keras_dist.callbacks.nested_values import pack, unpack
from keras_dist.storage.root_action import on_all

# JSON, and the bytes of its arrays.
Packed = tuple[Any, list[np.ndarray]]

# Key in the JSON of a backup, and names of its arrays.
FIT, ARRAY = "fit", "fit {part} {number}"
CALLBACKS = "callbacks"


class FitState:
    """The states of the callbacks and of the ranks of one fit."""

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback], root_rank: int):
        self._every = list(callbacks)
        self._root_rank = root_rank
        self._on_root: list[str] = []
        self._appending: list[Any] = []
        self._shared: Packed | None = None
        self._ranks: list[Packed] = []

    @property
    def callbacks(self) -> Mapping[str, keras.callbacks.Callback]:
        """The callbacks that act on this rank, by name; there may be more after ranks have died."""
        return callback_states.acting(self._every)

    def agree(self, resumes: bool) -> None:
        """Broadcasts the names of the callbacks of the root. Collective: every rank; blocks."""
        comm, names = runtime.fit_communicator(), list(self.callbacks)
        self._on_root = _engine.collectives.broadcast_object(
            comm, names, self._root_rank, "the callbacks of the root"
        )
        self._appending = callback_states.append_to_files(self.callbacks) if resumes else []

    def gather(
        self, model: keras.Model, logs: dict[str, Any], statistics: Mapping[int, np.ndarray]
    ) -> list[Packed]:
        """Returns the states of all ranks. Collective: every rank; blocks.

        Args:
            model: see `rank_states.state`.
            logs: see `rank_states.state`.
            statistics: see `rank_states.state`.

        Raises:
            CheckpointError: a custom callback fails in `state_dict`, or returns a value that a
                backup cannot contain; raised on every rank.
        """

        def mine() -> Packed:
            state = rank_states.state(model, logs, statistics)
            state[CALLBACKS] = callback_states.rank_states(self.callbacks, self._on_root)
            return _packed(state)

        return on_all(mine, "the states of ranks for a backup")

    def of_callbacks(self) -> Packed:
        """Returns the states of Keras' callbacks of this rank."""
        return _packed(callback_states.shared_states(self.callbacks))

    def found(self, parts: Sequence[Packed]) -> None:
        """Sets the result of `read`, which may be empty."""
        self._shared, self._ranks = (parts[0], list(parts[1:])) if parts else (None, [])

    def ranks(self) -> list[rank_states.RankState]:
        """Returns the states of all ranks in the backup."""
        return [unpack(*packed) for packed in self._ranks]

    def restore_callbacks(self) -> None:
        """Restores the states of callbacks. Collective: every rank; blocks."""
        for logger in self._appending:
            logger.append = False
        if self._shared is not None:
            on_all(self._restore, "the states of callbacks from a backup")

    def _restore(self) -> None:
        states = unpack(*self._shared)  # type: ignore[misc]
        for name, state in self._own().items():
            states[name] = {**states.get(name, {}), **state}
        callback_states.restore(self.callbacks, states)

    def _own(self) -> dict[str, Any]:
        """Returns the states in the backup that belong to this rank."""
        ranks, rank = self.ranks(), runtime.fit_rank()
        own: dict[str, Any] = rank_states.of_rank(ranks)[CALLBACKS]
        if len(ranks) == runtime.fit_size():
            return own
        # Positions in files differ between ranks.
        mine = ranks[rank][CALLBACKS] if rank < len(ranks) else {}
        return callback_states.with_files_of(own, mine)


def write(parts: Sequence[Packed], about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Adds packed states to the JSON and the arrays of a backup."""
    about[FIT] = [json for json, _ in parts]
    for part, (_, packed) in enumerate(parts):
        for number, array in enumerate(packed):
            arrays[ARRAY.format(part=part, number=number)] = array


def read(about: Mapping[str, Any], file: Mapping[str, np.ndarray]) -> list[Packed]:
    """Returns the packed states of `write`; none from a backup of an earlier version."""
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
