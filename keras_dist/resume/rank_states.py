"""What each rank has of its own because of options of its optimizers, in generations."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, runtime
from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist.resume.state import own
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.model_state import accumulators_of_steps, state_of_steps, to_numpy
from keras_dist.training.rank_gradients import key_of


class OwnSteps:
    """The state of the optimizers of each rank; a job of another size averages it.

    Gradients that wait for the next update are lost in a job of another size.
    """

    key = "local steps"

    def __init__(self, model: keras.Model):
        self._model = model

    def give(self) -> Any:
        return [to_numpy(variable) for variable in self._variables()]

    def take(self, states: Sequence[Any]) -> bool:
        variables = self._variables()
        if len(states) == runtime.fit_size():
            for variable, value in zip(variables, own(states), strict=True):
                variable.assign(value)
            return True
        for variable, *values in zip(state_of_steps(self._model), *states, strict=False):
            is_float = keras.backend.is_float_dtype(variable.dtype)
            wide = np.result_type(values[0], np.float32)  # a mean of bfloat16 adds up bfloat16
            variable.assign(np.mean(values, axis=0, dtype=wide) if is_float else values[0])
        return True

    def _variables(self) -> list[Any]:
        return [*state_of_steps(self._model), *accumulators_of_steps(self._model)]


class CompressionErrors:
    """The errors of compressed gradients of each rank; a job of another size divides their sum."""

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
