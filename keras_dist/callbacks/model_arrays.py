"""The variables of a model in a backup, and the check that they fit a model."""

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

SEED = "seed"  # prefix of the names of random states; other names are indices


def write(model: keras.Model, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a model by name, and adds their description to the JSON."""
    about["optimizers"] = described = built_optimizers.describe(model)
    held = built_optimizers.variables_of(model, described)
    about["variables"] = _describe(held)
    return {name: bytes_of(variable) for name, variable in _named(held, model)}


def restore(
    model: keras.Model, about: Mapping[str, Any], file: Mapping[str, np.ndarray], path: pathlib.Path
) -> None:
    """Restores the variables of a model from a backup, and builds its optimizers.

    Args:
        model: a built model.
        about: JSON of the backup.
        file: arrays of the backup by name.
        path: path of the backup, for messages.

    Raises:
        CheckpointError: the model is not built, or the backup is of another model.
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
                f"model {model.name!r} to be built, to restore {path}",
                "a model that is not built",
                "Build the model before fit: model.build(input_shape), or call it on a batch.",
            )
        )


def _check(mine: Sequence[Any], written: Sequence[Any], path: pathlib.Path) -> None:
    """Checks that a backup is of a model and optimizers with the same variables."""
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
            f"{other[1]} instead",
            versioned_backups.REMEDY,
        )
    )


def _describe(variables: Sequence[Any]) -> list[tuple[str, list[int], str]]:
    """Returns names, shapes and dtypes of variables."""
    return [(variable_name(v), list(v.shape), str(v.dtype)) for v in variables]
