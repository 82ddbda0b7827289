"""The variables of a model in a backup: their bytes, and the check that a model has such ones."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist.storage import versioned_backups
from keras_dist.training import built_optimizers
from keras_dist.training.model_state import (
    bytes_of,
    has_weights,
    random_states,
    to_numpy,
    variable_name,
)

__all__ = ["restore", "write"]

SEED = "seed"  # in the names of arrays; those of other variables are their numbers


def write(model: keras.Model, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a model by name, and adds to the JSON of a backup what they are."""
    about["optimizers"] = described = built_optimizers.describe(model)
    held = built_optimizers.variables_of(model, described)
    about["variables"] = _describe(held)
    return {name: bytes_of(variable) for name, variable in _named(held, model)}


def restore(
    model: keras.Model, about: Mapping[str, Any], file: Mapping[str, np.ndarray], path: pathlib.Path
) -> None:
    """Gives a model the values of its variables in a backup, and builds optimizers that have some.

    Args:
        model: the model, which has its weights.
        about: the JSON of the backup.
        file: its arrays by name.
        path: where it is, for messages.

    Raises:
        CheckpointError: the model is not built, or the backup is of another one.
    """
    _check_built(model, path)
    described = about.get("optimizers") or built_optimizers.describe(model)
    built_optimizers.build(model, described)
    held = built_optimizers.variables_of(model, described)
    _check(_describe(held), about["variables"], path)
    if (other := built_optimizers.difference(model, described)) is not None:
        raise ValueError(other)
    for name, variable in _named(held, model):
        variable.assign(file[name].view(to_numpy(variable).dtype).reshape(variable.shape))
    built_optimizers.reset_undescribed(model, described)


def _named(held: Sequence[Any], model: keras.Model) -> list[tuple[str, Any]]:
    seeds = enumerate(random_states(model))
    return [
        *((str(number), variable) for number, variable in enumerate(held)),
        *((f"{SEED}{number}", variable) for number, variable in seeds),
    ]


def _check_built(model: keras.Model, path: pathlib.Path) -> None:
    if not has_weights(model):
        raise errors.CheckpointError(
            errors.explain(
                runtime.where(),
                f"model {model.name!r} to have its weights, to restore {path}",
                "a model that is not built",
                "Build it before fit: model.build(input_shape), or call it on one batch.",
            )
        )


def _check(mine: Sequence[Any], written: Sequence[Any], path: pathlib.Path) -> None:
    """Checks that a file was written by a model and optimizers such as these."""
    none: Any = ("none", None, None)
    pairs = itertools.zip_longest(mine, written, fillvalue=none)
    different: Any = next((pair for pair in pairs if list(pair[0][1:]) != list(pair[1][1:])), None)
    if different is None:
        return
    (expected, *kind), (received, *other) = different
    raise errors.CheckpointError(
        errors.explain(
            runtime.where(),
            f"the {len(mine)} variables of this model and its optimizer in the backup {path}, "
            f"with {expected!r} of shape {kind[0]} and dtype {kind[1]}",
            f"{len(written)} variables, with {received!r} of shape {other[0]} and dtype "
            f"{other[1]} in that place",
            versioned_backups.REMEDY,
        )
    )


def _describe(variables: Sequence[Any]) -> list[tuple[str, list[int], str]]:
    """Returns names, shapes and dtypes of variables."""
    return [(variable_name(one), list(one.shape), str(one.dtype)) for one in variables]
