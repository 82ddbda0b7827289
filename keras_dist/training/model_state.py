"""The state of a model: weights, optimizer variables, and state that is local to a rank.

Does not communicate. `replicas` makes state equal on all ranks.
"""

import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_dist._compat.keras import models, optimizer_state
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, inner_optimizer

__all__ = [
    "SKIPPING",
    "accumulators",
    "bytes_of",
    "families",
    "has_weights",
    "keep_local",
    "local_variables",
    "optimizers_inside",
    "optimizers_of",
    "random_states",
    "shared_state",
    "state",
    "to_numpy",
    "trained_by",
    "variable_name",
]

# Attribute of a model while batches of a resumed epoch are skipped: the function that ends it.
SKIPPING = "_keras_dist_skipping"
# On a model: which variables each rank keeps for itself, whatever its optimizers do.
LOCAL = "_keras_dist_local"


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers of a model and their inner optimizers, without duplicates.

    The compiled optimizer comes first. A custom train step may use others, found in attributes of
    the model and in its lists and dicts.
    """
    every = [one for family in families(model) for one in family]
    return list({id(one): one for one in every}.values())


def families(model: keras.Model) -> list[list[Any]]:
    """Returns each optimizer of a model together with those inside it, in the same order."""
    found: list[Any] = [models.optimizer_of(model)]
    for value in vars(model).values():
        items = value.values() if isinstance(value, dict) else value
        found.extend(items if isinstance(value, list | tuple | dict) else [value])
    ours = {id(one): one for one in found if isinstance(one, keras.optimizers.Optimizer)}
    return [[outer, *optimizers_inside(outer)] for outer in ours.values()]


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns the optimizers to which this one hands gradients on, as far as they are known."""
    if isinstance(optimizer, MULTI_OPTIMIZER):
        return list(optimizer.optimizers)
    inner = inner_optimizer(optimizer)
    return [] if inner is None else [inner, *optimizers_inside(inner)]


def has_weights(model: keras.Model) -> bool:
    """Returns whether the weights of a model exist.

    In a model with a custom `train_step` only the layers may be built.
    """
    layers = [layer for layer in models.layers_of(model) if layer is not model]
    return model.built or (bool(layers) and all(layer.built for layer in layers))


def state(model: keras.Model) -> list[Any]:
    """Returns the variables that must be equal on all ranks, each once.

    Args:
        model: a Keras model; variables of unbuilt optimizers are left out.

    Returns:
        List of Keras variables, in the same order on every rank.
    """
    variables = list(model.weights)
    for optimizer in optimizers_of(model):
        variables.extend(optimizer.variables)
    own = {id(variable) for variable in accumulators(optimizers_of(model))}
    return list({id(v): v for v in variables if id(v) not in own}.values())


def shared_state(model: keras.Model) -> list[Any]:
    """Returns the state without local variables and their optimizer slots."""
    left_out = _with_slots(optimizers_of(model), local_variables(model))
    return [variable for variable in state(model) if id(variable) not in left_out]


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that the ranks of a distributed optimizer share.

    These are its state and its trainable variables, without local variables and accumulators.
    """
    every = [optimizer, *optimizers_inside(optimizer)]
    local = optimizer._keras_dist.local_variables()
    own = _with_slots(every, local) | {id(one) for one in accumulators(every)}
    variables = [*optimizer_state.trained_by(optimizer), *optimizer.variables]
    return list({id(v): v for v in variables if id(v) not in own}.values())


def accumulators(optimizers: Iterable[Any]) -> list[Any]:
    """Returns the variables in which a rank gathers its own gradients between two updates."""
    return [variable for one in optimizers for variable in optimizer_state.accumulators(one)]


def keep_local(model: keras.Model, variables: Iterable[Any]) -> None:
    """Makes variables of a model local, in addition to those of its optimizers."""
    object.__setattr__(model, LOCAL, variables)


def local_variables(model: keras.Model) -> list[Any]:
    """Returns the local variables of a model and of its optimizers."""
    reductions = [getattr(one, "_keras_dist", None) for one in optimizers_of(model)]
    own = [v for one in reductions if one is not None for v in one.local_variables()]
    return [*own, *_as_keras_knows(model, model.__dict__.get(LOCAL, ()))]


def random_states(model: keras.Model) -> list[Any]:
    """Returns the variables of a model's random generators, which differ from rank to rank."""
    weights = {id(weight) for weight in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def variable_name(variable: Any) -> str:
    """Returns the path of a variable, such as `dense/kernel`."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "a tensor"
    return re.sub(r":\d+$", "", str(path))


def bytes_of(variable: Any) -> np.ndarray:
    """Returns the value of a variable as a flat uint8 array."""
    return np.ascontiguousarray(to_numpy(variable)).reshape(-1).view(np.uint8)


def to_numpy(variable: Any) -> np.ndarray:
    """Returns the value of a variable as a host array."""
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _as_keras_knows(model: keras.Model, variables: Iterable[Any]) -> list[Any]:
    """Returns the Keras variables of TensorFlow variables that the user has passed."""
    if all(isinstance(variable, keras.Variable) for variable in variables):
        return list(variables)
    by_value = {id(variable.value): variable for variable in model.variables}
    return [by_value.get(id(variable), variable) for variable in variables]


def _with_slots(optimizers: Iterable[Any], variables: Iterable[Any]) -> set[int]:
    """Returns the ids of variables and of their optimizer slots."""
    left_out = {id(variable) for variable in variables}
    for one in optimizers:
        trainable = optimizer_state.trained_by(one)
        places = [place for place, variable in enumerate(trainable) if id(variable) in left_out]
        # Keras' optimizers keep what belongs to each variable in lists as long as theirs.
        for slots in optimizer_state.slots(one, len(trainable)) if places else ():
            left_out.update(id(slots[place]) for place in places)
    return left_out
