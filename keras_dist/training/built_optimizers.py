"""For which variables the optimizers of a model are built, and the same brought about elsewhere.

An optimizer that a custom `train_step` uses is built at its first step, for what it is given
there. State of a model that is restored, or comes from another rank, needs it built before.

What is described is JSON: for each optimizer, and those inside it, the places of the variables
among the weights of the model for which it is built, or `None`, and the number of its own.
Knows no ranks.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import keras

from keras_dist._compat.keras import trained_by
from keras_dist.training.model_state import accumulators, families, optimizers_inside, optimizers_of

__all__ = ["agreed", "begin_anew", "build", "describe", "difference", "held_by"]

# One for each optimizer of a model: itself, then those inside it, as (places, number) each.
Described = list[list[tuple[list[int | None] | None, int]]]

_EVERY: Any = (None, None)  # of an optimizer that is not described


def describe(model: keras.Model) -> Described:
    """Returns for which variables the optimizers of a model are built."""
    places = {id(weight): place for place, weight in enumerate(model.weights)}

    def built_for(one: Any) -> list[int | None] | None:
        if not one.built:
            return None
        return [places.get(id(variable)) for variable in trained_by(one)]

    return [[(built_for(one), len(_own(one))) for one in family] for family in families(model)]


def agreed(descriptions: Sequence[Described]) -> Described:
    """Returns what holds on all ranks once each has built what any has: the first such counts."""
    return [
        [
            next((one for one in members if one and one[0] is not None), None)
            or next(filter(None, members))
            for members in zip_longest(*family)
        ]
        for family in zip(*descriptions, strict=False)
    ]


def build(model: keras.Model, described: Described) -> None:
    """Builds the optimizers of a model that are not, for the variables that are described."""
    weights = list(model.weights)
    for number, members in enumerate(described[: len(families(model))]):
        for place, (built_for, _) in enumerate(members):
            family = families(model)[number]  # a `MultiOptimizer` may know more once it is built
            if built_for is None or place >= len(family) or family[place].built:
                continue
            known = [weights[at] for at in built_for if at is not None and at < len(weights)]
            if len(known) == len(built_for):
                family[place].build(known)


def difference(model: keras.Model, described: Described) -> str | None:
    """Returns which optimizer of a model is built for other variables, in words."""
    for family, mine, members in zip(families(model), describe(model), described, strict=False):
        for one, (now, _), (built_for, _) in zip(family, mine, members, strict=False):
            if now is not None and built_for is not None and now != list(built_for):
                return f"{one.name!r}, built for other variables of the model, or in another order"
    return None


def held_by(model: keras.Model, described: Described) -> list[Any]:
    """Returns those variables of the state of a model that it had when it was described.

    Args:
        model: a built Keras model, whose optimizers are built for what is described, or more.
        described: as of `describe`.

    Returns:
        List of Keras variables, in the order in which the model that was described has them.
    """
    variables = list(model.weights)
    for family, members in zip_longest(families(model), described, fillvalue=()):
        for one, (built_for, count) in zip(family, members or [_EVERY] * len(family), strict=False):
            own = _own(one)
            variables.extend(own[:count] if built_for is None else own)
    left_out = {id(variable) for variable in accumulators(optimizers_of(model))}
    return list({id(v): v for v in variables if id(v) not in left_out}.values())


def begin_anew(model: keras.Model, described: Described) -> None:
    """Sets what the optimizers of a model had not when it was described to what they begin with."""
    held = {id(variable) for variable in held_by(model, described)}
    for family, members in zip(families(model), described, strict=False):
        if len(family) > len(members) or any(
            one.built and built_for is None
            for one, (built_for, _) in zip(family, members, strict=False)
        ):
            _reset(family[0], held)


def _own(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer but for those of others inside it."""
    inside = {id(v) for inner in optimizers_inside(optimizer) for v in inner.variables}
    return [variable for variable in optimizer.variables if id(variable) not in inside]


def _reset(optimizer: Any, but: set[int]) -> None:
    """Sets variables of an optimizer, but for some, to what they are when it has just been built.

    They need not be 0: some begin as a constant, or as a copy of the weights.
    """
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(trained_by(optimizer))
    for variable, value in zip(optimizer.variables, fresh.variables, strict=True):
        if id(variable) not in but:
            variable.assign(value)
