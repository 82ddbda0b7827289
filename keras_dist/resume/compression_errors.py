"""What ranks have not sent of their gradients, in generations."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, runtime
from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist.resume.state import own
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.rank_gradients import key_of


class CompressionErrors:
    """The errors of compressed gradients of each rank.

    In a job of another size each rank gets the same share of their sum.
    """

    key = "compression"

    def __init__(self, model: keras.Model):
        self._model = model

    def give(self) -> Any:
        return [each._keras_dist.feedback.give(_keys(each)) for each in self._optimizers()]

    def take(self, states: Sequence[Any]) -> bool:
        size = runtime.fit_size()
        for number, optimizer in enumerate(self._optimizers()):
            found = [each[number] for each in states if number < len(each)]
            if not found or not found[0]["step"]:
                continue
            is_sum = optimizer._keras_dist.options.op is _engine.ReduceOp.SUM
            scale = 1 / size if is_sum else 1 / len(found)
            if len(found) == size:
                found, scale = [own(found)], 1.0
            optimizer._keras_dist.feedback.take(_keys(optimizer), found, scale)
        return True

    def _optimizers(self) -> list[Any]:
        """Returns the optimizers that reduce, not those around them, which scale the loss."""
        every = distributed_optimizers(self._model)
        return list({id(each._keras_dist): each for each in every}.values())


def _keys(optimizer: Any) -> list[int]:
    return [key_of(variable) for variable in trained_by(optimizer)] if optimizer.built else []
