"""The state of each rank: random generators, moving statistics and metrics of an epoch.

A backup contains the states of all ranks. In a job of the same size each rank restores its own; in
another size the totals of metrics are preserved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import runtime
from keras_dist.callbacks.log_values import number_of
from keras_dist.training import layer_state
from keras_dist.training.metric_states import states_of
from keras_dist.training.model_state import random_states, to_numpy
from keras_dist.training.seeds import separate_generators

RankState = dict[str, Any]


def state(
    model: keras.Model, logs: dict[str, Any], statistics: Mapping[int, np.ndarray]
) -> RankState:
    """Returns the state of this rank."""
    numbers = {name: number_of(value) for name, value in logs.items()}
    return {
        "random": [to_numpy(variable) for variable in random_states(model)],
        "metrics": [to_numpy(variable) for variable in model.metrics_variables],
        "logs": {n: float(v) for n, v in numbers.items() if v is not None and v.ndim == 0},
        "statistics": dict(statistics),
    }


def of_rank(states: Sequence[RankState]) -> RankState:
    """Returns the state of this rank, or of rank 0 in a job of another size."""
    rank = runtime.fit_rank()
    return states[rank] if len(states) == runtime.fit_size() else states[0]


def restore_random(model: keras.Model, states: Sequence[RankState], root_rank: int) -> None:
    """Restores the random generators of each rank. Collective: every rank; blocks."""
    if len(states) != runtime.fit_size():
        separate_generators(model, root_rank)
        return
    for variable, value in zip(random_states(model), of_rank(states)["random"], strict=True):
        variable.assign(value)


def restore_statistics(model: keras.Model, states: Sequence[RankState]) -> None:
    """Restores the moving statistics of each rank; a job of another size keeps their average."""
    if len(states) == runtime.fit_size():
        assign_statistics(model, of_rank(states).get("statistics", {}))


def assign_statistics(model: keras.Model, statistics: Mapping[int, np.ndarray]) -> None:
    """Assigns values to non-trainable weights, by index."""
    weights = list(model.non_trainable_weights)
    for index, value in statistics.items():
        weights[index].assign(value)
    if statistics:
        layer_state.write(model, None)


def restore_metrics(model: keras.Model, states: Sequence[RankState]) -> bool:
    """Restores the metrics of each rank; in a job of another size, rank 0 gets the totals."""
    variables = model.metrics_variables
    shapes = [tuple(variable.shape) for variable in variables]
    if any([value.shape for value in each["metrics"]] != shapes for each in states):
        return False
    known = states_of(model)
    for number, variable in enumerate(variables):
        values = [each["metrics"][number] for each in states]
        state = known.get(id(variable))
        if len(states) == runtime.fit_size():
            variable.assign(values[runtime.fit_rank()])
        elif state is None:
            variable.assign(values[0])
        elif runtime.fit_rank() == 0 or state.how == "mean":
            variable.assign(state.joined(values))
    return True
