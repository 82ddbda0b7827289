"""The random generators of each rank in a backup.

The order of data is drawn at the start of an epoch, and train steps draw in between. A fit that
resumes within an epoch draws the order again, skips the batches, and then sets the generators to
their states when the backup was written.
"""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, runtime
from keras_dist.data import epochs
from keras_dist.training import random_generators

States = dict[str, Any]


class RandomState:
    """The states of the generators of this rank."""

    def __init__(self) -> None:
        self._at_begin: States = {}
        self._resumed: States = {}
        self._skipped: States = {}

    def begin_epoch(self) -> None:
        """Saves the states from which the order of an epoch is drawn, or restores them."""
        _set(self._resumed)
        self._resumed = {}
        self._at_begin = random_generators.states(_data())

    def gather(self, within: bool) -> list[list[States]]:
        """Returns the states of all ranks. Collective: every rank; blocks.

        Args:
            within: whether the backup is written within an epoch.
        """
        now = random_generators.states(_data())
        mine = [self._at_begin, now] if within else [now]
        return _engine.collectives.allgather_object(
            runtime.fit_communicator(),
            mine,
            operation="the random numbers of the ranks for a backup",
        )

    def resume(self, found: Sequence[list[States]] | None) -> None:
        """Restores the generators of this rank from a backup of the same number of ranks."""
        self._resumed = self._skipped = {}
        if found is None or len(found) != runtime.fit_size():
            return
        at_begin, *later = found[runtime.fit_rank()]
        _set(at_begin)
        if later:
            self._resumed, self._skipped = at_begin, _of_steps(later[0])

    def skipped(self) -> None:
        """Sets the generators to their states after the skipped steps."""
        _set(self._skipped)
        self._skipped = {}


def _data() -> Any:
    return epochs.fit_arguments().get("x")


def _set(states: States) -> None:
    random_generators.restore(states, _data())


def _of_steps(states: States) -> States:
    """Returns the states of generators that train steps use.

    On TensorFlow a thread reads data ahead of training, so generators of data continue.
    """
    if keras.backend.backend() != "tensorflow":
        return states
    return {name: state for name, state in states.items() if name == "keras"}
