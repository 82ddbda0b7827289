"""The variables of a model in a file, and the check that they fit a model."""

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist.storage import versioned_backups
from keras_dist.training import built_optimizers, layer_state
from keras_dist.training.model_state import (
    has_weights,
    random_states,
    to_numpy,
    variable_name,
)
from keras_dist.training.sharded_state import assign, shape_of, whole_value

INTEGER = re.compile(r"u?int\d+")
SEED = "seed"  # prefix of the names of random states; names of variables are indices
LAYERS = "layers"  # name of what layers keep besides their variables


def write(model: keras.Model, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a model by name, and adds their description to the JSON.

    If the state of an optimizer is sharded, only in the context `gathered`.
    """
    held = describe(model, about)
    arrays = {name: _bytes(whole_value(variable)) for name, variable in _named(held, model)}
    return {**arrays, **write_layers(model)}


def write_layers(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns what layers keep besides their variables, as an array by name, if they do."""
    kept = layer_state.read(model)
    return {LAYERS: layer_state.pack(kept)} if kept else {}


def restore_layers(model: keras.Model, file: Mapping[str, np.ndarray], is_root: bool) -> None:
    """Restores what layers keep; derives constants from variables, which are restored."""
    kept = layer_state.unpack(file[LAYERS]) if LAYERS in file else None
    if kept is not None and not is_root:
        kept = layer_state.without_local(model, kept)
    layer_state.write(model, kept)


def describe(model: keras.Model, about: dict[str, Any]) -> list[Any]:
    """Returns the variables of a model and its optimizers, and adds their description to a JSON."""
    about["optimizers"] = described = built_optimizers.describe(model)
    held = built_optimizers.variables_of(model, described)
    about["variables"] = _describe(held)
    return held


def restore(
    model: keras.Model, about: Mapping[str, Any], file: Mapping[str, np.ndarray], path: pathlib.Path
) -> None:
    """Restores the variables of a model from a backup, and builds its optimizers."""
    held = fit_to(model, about, path)
    for name, variable in _named(held, model):
        value = file[name].view(to_numpy(variable).dtype).reshape(shape_of(variable))
        assign(variable, value)
    restore_layers(model, file, is_root=True)


def fit_to(
    model: keras.Model, about: Mapping[str, Any], path: pathlib.Path, any_integers: bool = False
) -> list[Any]:
    """Builds the optimizers of a model as described and returns the described variables.

    Optimizer variables that are not described get their initial values.
    """
    _check_built(model, path)
    described = about.get("optimizers") or built_optimizers.describe(model)
    built_optimizers.build(model, described)
    held = built_optimizers.variables_of(model, described)
    _check(_describe(held), about["variables"], path, any_integers)
    if (other := built_optimizers.difference(model, described)) is not None:
        raise ValueError(other)
    built_optimizers.reset_undescribed(model, described)
    return held


def _bytes(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _named(held: Sequence[Any], model: keras.Model) -> list[tuple[str, Any]]:
    seeds = enumerate(random_states(model))
    return [
        *((str(number), variable) for number, variable in enumerate(held)),
        *((f"{SEED}{number}", variable) for number, variable in seeds),
    ]


def _check_built(model: keras.Model, path: pathlib.Path) -> None:
    if not has_weights(model):
        raise errors.CheckpointError(
            runtime.where(),
            f"model {model.name!r} to be built, to restore {path}",
            "a model that is not built",
            "Build the model before fit: model.build(input_shape), or call it on a batch.",
        )


def _check(
    mine: Sequence[Any], written: Sequence[Any], path: pathlib.Path, any_integers: bool
) -> None:
    """Checks that a backup is of a model and optimizers with the same variables."""

    def kind_of(described: Any) -> tuple[Any, str]:
        _, shape, dtype = described
        return shape, INTEGER.sub("int", str(dtype)) if any_integers else str(dtype)

    none: Any = ("none", None, None)
    pairs = itertools.zip_longest(mine, written, fillvalue=none)
    different: Any = next((pair for pair in pairs if kind_of(pair[0]) != kind_of(pair[1])), None)
    if different is None:
        return
    (expected, *kind), (received, *other) = different
    raise errors.CheckpointError(
        runtime.where(),
        f"the {len(mine)} variables of this model and its optimizer in the backup {path}, "
        f"with {expected!r} of shape {kind[0]} and dtype {kind[1]}",
        f"{len(written)} variables, with {received!r} of shape {other[0]} and dtype "
        f"{other[1]} instead",
        versioned_backups.REMEDY,
    )


def _describe(variables: Sequence[Any]) -> list[tuple[str, list[int], str]]:
    """Returns names, shapes and dtypes of variables."""
    return [(variable_name(v), list(shape_of(v)), str(v.dtype)) for v in variables]
