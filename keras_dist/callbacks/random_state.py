"""The random numbers of a fit that is resumed: where the generators of each rank were, and when.

The order of data is drawn at the begin of an epoch, what a train step draws comes in between. An
epoch that is resumed within draws its order once more, reads what has been learnt, and then goes
on where the generators were when the backup was written.
"""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, runtime
from keras_dist.data import epochs
from keras_dist.training import random_generators

__all__ = ["RandomState"]

States = dict[str, Any]


class RandomState:
    """The generators of this rank, noted for a backup and set to what one holds."""

    def __init__(self) -> None:
        self._at_begin: States = {}
        self._resumed: States = {}
        self._skipped: States = {}

    def begin_epoch(self) -> None:
        """Notes from where the order of an epoch is drawn, or goes back there."""
        _set(self._resumed)
        self._resumed = {}
        self._at_begin = random_generators.states(_data())

    def gather(self, within: bool) -> list[list[States]]:
        """Returns what a backup keeps of each rank. Collective: every rank; blocks.

        Args:
            within: whether it is written within an epoch.
        """
        now = random_generators.states(_data())
        mine = [self._at_begin, now] if within else [now]
        return _engine.collectives.allgather_object(
            runtime.communicator(), mine, operation="the random numbers of the ranks for a backup"
        )

    def resume(self, found: Sequence[list[States]] | None) -> None:
        """Sets the generators of this rank to what a backup of as many ranks holds.

        Args:
            found: what `gather` returned, or nothing.
        """
        self._resumed = self._skipped = {}
        if found is None or len(found) != runtime.size():
            return
        at_begin, *later = found[runtime.rank()]
        _set(at_begin)
        if later:
            self._resumed, self._skipped = at_begin, _of_steps(later[0])

    def skipped(self) -> None:
        """Goes on where the generators were when the steps that are skipped had been trained."""
        _set(self._skipped)
        self._skipped = {}


def _data() -> Any:
    return epochs.trained_with().get("x")


def _set(states: States) -> None:
    random_generators.restore(states, _data())


def _of_steps(states: States) -> States:
    """Returns those of generators that train steps draw from, as far as that can be told.

    On TensorFlow a thread reads data ahead of training, so what it draws goes on by itself.
    """
    if keras.backend.backend() != "tensorflow":
        return states
    return {name: state for name, state in states.items() if name == "keras"}
