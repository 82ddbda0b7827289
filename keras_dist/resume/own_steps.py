"""The state of optimizers that make local steps, which differs between ranks."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import runtime
from keras_dist.resume.state import own
from keras_dist.training.model_state import accumulators_of_steps, state_of_steps, to_numpy


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
            variable.assign(np.mean(values, axis=0) if is_float else values[0])
        return True

    def _variables(self) -> list[Any]:
        return [*state_of_steps(self._model), *accumulators_of_steps(self._model)]
