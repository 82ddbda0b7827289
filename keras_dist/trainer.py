"""What a Keras model needs before its train step is built, whoever trains it.

An optimizer is not told which model it belongs to, and `train_on_batch` calls no callbacks;
but every way to train goes through `Model.make_train_function`, which Keras documents as the
place to change how a step is made. It is wrapped once, when the first optimizer is
distributed, and does nothing for models with other optimizers.
"""

import functools
from typing import Any

import keras

from keras_dist import _backends
from keras_dist.reduction import is_distributed, move_outwards

__all__ = ["watch_models"]


TRACED_FOR = "_keras_dist_traced_for"


@functools.cache
def watch_models() -> None:
    """Makes every Keras model of this process ready for a distributed optimizer."""
    original = keras.Model.make_train_function

    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> Any:
        move_outwards(self.optimizer)
        if not is_distributed(self.optimizer):
            return original(self, force)
        # A step that was traced before the optimizer was wrapped, or for ranks that have
        # been left since, holds no reduction, or one among those ranks.
        comm = self.optimizer._keras_dist.communicator()
        reduction = (self.optimizer._keras_dist, comm)
        force = force or self.__dict__.get(TRACED_FOR) != reduction
        self.__dict__[TRACED_FOR] = reduction
        if comm is None:
            return original(self, force)
        backend = _backends.active()
        backend.check_model(self)
        # Only the train step meets the host; evaluate and predict are compiled as ever.
        with backend.train_step_for_host(self):
            return original(self, force)

    keras.Model.make_train_function = make_train_function
