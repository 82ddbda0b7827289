"""Descriptions of built optimizers, by which those of a custom `train_step` are built elsewhere.

Such an optimizer is built at its first step. To restore or broadcast its state, it must be before.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import keras

from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist.training import sharded_state
from keras_dist.training.model_state import (
    accumulators,
    families,
    optimizers_inside,
    optimizers_of,
    to_numpy,
)
from keras_dist.training.saved_options import plain_config

# JSON: for each optimizer of a model, itself and its inner optimizers, the indices of its variables
# among the weights of the model, or `None` if it is not built, and the number of its own variables.
Described = list[list[tuple[list[int | None] | None, int]]]

_UNKNOWN: Any = (None, None)  # for an optimizer without description: all its variables


def describe(model: keras.Model) -> Described:
    """Returns the description of the optimizers of a model."""
    indices = {id(weight): index for index, weight in enumerate(model.weights)}

    def built_for(optimizer: Any) -> list[int | None] | None:
        if not optimizer.built:
            return None
        return [indices.get(id(variable)) for variable in trained_by(optimizer)]

    return [
        [(built_for(member), len(_own(member))) for member in family] for family in families(model)
    ]


def merge(descriptions: Sequence[Described]) -> Described:
    """Merges descriptions: for each optimizer, takes the first description of a built one."""
    return [
        [
            next((member for member in members if member and member[0] is not None), None)
            or next(filter(None, members))
            for members in zip_longest(*family)
        ]
        for family in zip(*descriptions, strict=False)
    ]


def build(model: keras.Model, described: Described) -> None:
    """Builds the unbuilt optimizers of a model for the described variables."""
    weights = list(model.weights)
    for number, members in enumerate(described[: len(families(model))]):
        for position, (built_for, _) in enumerate(members):
            family = families(model)[number]  # building a `MultiOptimizer` may add members
            if built_for is None or position >= len(family) or family[position].built:
                continue
            known = [weights[at] for at in built_for if at is not None and at < len(weights)]
            if len(known) == len(built_for):
                family[position].build(known)


def difference(model: keras.Model, described: Described) -> str | None:
    """Returns a phrase for the first optimizer that is built differently, or `None`."""
    for family, current, members in zip(families(model), describe(model), described, strict=False):
        for member, (now, _), (built_for, _) in zip(family, current, members, strict=False):
            if now is not None and built_for is not None and now != list(built_for):
                return (
                    f"{member.name!r}, built for other variables of the model, or in another order"
                )
    return None


def variables_of(model: keras.Model, described: Described) -> list[Any]:
    """Returns the state variables of a model that existed when it was described."""
    variables = list(model.weights)
    for family, members in zip_longest(families(model), described, fillvalue=()):
        for member, (built_for, count) in zip(
            family, members or [_UNKNOWN] * len(family), strict=False
        ):
            own = _own(member)
            variables.extend(own[:count] if built_for is None else own)
    excluded = {id(variable) for variable in accumulators(optimizers_of(model))}
    return list({id(v): v for v in variables if id(v) not in excluded}.values())


def reset_undescribed(model: keras.Model, described: Described) -> None:
    """Resets optimizer variables that did not exist when the model was described."""
    described_ids = {id(variable) for variable in variables_of(model, described)}
    for family, members in zip(families(model), described, strict=False):
        if len(family) > len(members) or any(
            member.built and built_for is None
            for member, (built_for, _) in zip(family, members, strict=False)
        ):
            _reset(family[0], described_ids)


def _own(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer without those of its inner optimizers."""
    inside = {id(v) for inner in optimizers_inside(optimizer) for v in inner.variables}
    return [variable for variable in optimizer.variables if id(variable) not in inside]


def _reset(optimizer: Any, excluded: set[int]) -> None:
    """Resets the variables of an optimizer to their initial values, except excluded ids."""
    # Not all initial values are 0.
    fresh = type(optimizer).from_config(plain_config(optimizer))
    fresh.build(trained_by(optimizer))
    for variable, value in zip(optimizer.variables, fresh.variables, strict=True):
        if id(variable) not in excluded:
            sharded_state.assign(variable, to_numpy(value))
