"""The state that each rank has of its own: random generators, metrics of an epoch, its files.

A backup holds that of all ranks. Ranks of a job of the same size receive their own; in another
size the totals of metrics stay what they were.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import runtime
from keras_dist.training.model_state import random_states, to_numpy
from keras_dist.training.replicas import separate_seeds

__all__ = ["RankState", "of_rank", "restore_metrics", "restore_random", "state"]

RankState = dict[str, Any]


def state(model: keras.Model, logs: dict[str, Any]) -> RankState:
    """Returns the state of this rank.

    Args:
        model: the model that is trained.
        logs: those of its last batch; only numbers are kept of them.
    """
    numbers = {name: to_numpy(value) for name, value in logs.items() if _is_number(value)}
    return {
        "random": [to_numpy(variable) for variable in random_states(model)],
        "metrics": [to_numpy(variable) for variable in model.metrics_variables],
        "logs": {name: float(value) for name, value in numbers.items()},
    }


def of_rank(states: Sequence[RankState]) -> RankState:
    """Returns the state that belongs to this rank, or, in a job of another size, to rank 0."""
    rank = runtime.rank()
    return states[rank] if len(states) == runtime.size() else states[0]


def restore_random(model: keras.Model, states: Sequence[RankState], root_rank: int) -> None:
    """Gives each rank its random generators. Collective: every rank; blocks.

    Args:
        model: a built model, which has the generators of the root.
        states: those of all ranks, from a backup.
        root_rank: the rank that has read it.
    """
    if len(states) != runtime.size():
        separate_seeds(model, root_rank)
        return
    for variable, value in zip(random_states(model), of_rank(states)["random"], strict=True):
        variable.assign(value)


def restore_metrics(model: keras.Model, states: Sequence[RankState]) -> bool:
    """Gives each rank its metrics; where ranks are more or fewer, rank 0 has the totals.

    Returns:
        Whether the model has these metrics.
    """
    variables = model.metrics_variables
    shapes = [tuple(variable.shape) for variable in variables]
    if any([value.shape for value in each["metrics"]] != shapes for each in states):
        return False
    for number, variable in enumerate(variables):
        values = [each["metrics"][number] for each in states]
        if len(states) == runtime.size():
            variable.assign(values[runtime.rank()])
        else:
            _assign_together(variable, values)
    return True


def _assign_together(variable: Any, values: Sequence[np.ndarray]) -> None:
    if variable.aggregation == "mean":
        variable.assign(np.mean(values, axis=0, dtype=np.float64).astype(values[0].dtype))
    elif variable.aggregation != "sum":
        variable.assign(values[0])
    elif runtime.rank() == 0:
        variable.assign(np.sum(values, axis=0, dtype=values[0].dtype))


def _is_number(value: Any) -> bool:
    kinds = (bool, int, float, np.generic, np.ndarray)
    return (isinstance(value, kinds) or keras.ops.is_tensor(value)) and np.ndim(value) == 0
