"""The variables of a model in a generation, and the check that they fit a model."""

import itertools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist.resume.format import REMEDY
from keras_dist.resume.pieces import dtype_of
from keras_dist.resume.read import Contents
from keras_dist.training import built_optimizers, layer_state
from keras_dist.training.model_state import (
    accumulators,
    bytes_of,
    has_weights,
    optimizers_of,
    random_states,
    shared_state,
    slice_of,
    to_numpy,
    variable_name,
)
from keras_dist.training.sharded_state import assign, shape_of

INTEGER = re.compile(r"u?int\d+")
SEED = "seed"  # prefix of the names of random states
LAYERS = "layers"  # name of what layers keep besides their variables


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


def others_of(model: keras.Model, about: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the bytes of random states and of what layers keep, by name; describes the former."""
    seeds = [to_numpy(state) for state in random_states(model)]
    about["seed dtypes"] = [seed.dtype.name for seed in seeds]
    found = {f"{SEED}{number}": bytes_of(seed) for number, seed in enumerate(seeds)}
    return {**found, **write_layers(model)}


def restore(model: keras.Model, contents: Contents, is_root: bool, alone: bool = False) -> None:
    """Restores weights, optimizers and random states of a model.

    Does not communicate. Of optimizers that shard their state, a rank reads its slices.
    """
    path = contents.generation.path
    try:
        _restore(model, contents, is_root, alone)
    except errors.CheckpointError:
        raise
    except (OSError, ValueError, KeyError) as error:
        expected = f"to read the variables of model {model.name!r} from the checkpoint {path}"
        text = errors.explain(runtime.where(), expected, f"{type(error).__name__}: {error}", REMEDY)
        raise errors.CheckpointError(text) from error


def _restore(model: keras.Model, contents: Contents, is_root: bool, alone: bool) -> None:
    about = contents.about
    held = fit_to(model, about, contents.generation.path)
    equal = {id(variable) for variable in shared_state(model)}
    for index, variable in enumerate(held):
        sliced, dtype = slice_of(variable), dtype_of(variable)
        if sliced is not None and not alone:
            part = sliced[0].parts[sliced[1]]
            value = contents.elements(index, part.start, part.stop)
            variable.assign(value.astype(dtype, copy=False))
        elif is_root or id(variable) in equal:
            shape = shape_of(variable)
            value = contents.elements(index, 0, math.prod(shape)).reshape(shape)
            assign(variable, value.astype(dtype, copy=False))
    arrays = contents.others()
    for number, generator in enumerate(random_states(model)):
        if (name := f"{SEED}{number}") in arrays:
            value, dtype = arrays[name], dtype_of(generator)
            # A backup of earlier versions does not name the dtype, which depends on the backend.
            width = value.size // math.prod(generator.shape)
            value = value.view(
                (about.get("seed dtypes") or {number: f"{dtype.kind}{width}"})[number]
            )
            generator.assign(value.astype(dtype).reshape(generator.shape))
    restore_layers(model, arrays, is_root)


def clear_accumulators(model: keras.Model) -> None:
    """Clears accumulated gradients: those of another rank must not be applied."""
    for accumulator in accumulators(optimizers_of(model)):
        accumulator.assign(keras.ops.zeros(accumulator.shape, accumulator.dtype))


def fit_to(model: keras.Model, about: Mapping[str, Any], path: pathlib.Path) -> list[Any]:
    """Builds the optimizers of a model as described and returns the described variables.

    Optimizer variables that are not described get their initial values.
    """
    _check_built(model, path)
    described = about.get("optimizers") or built_optimizers.describe(model)
    built_optimizers.build(model, described)
    held = built_optimizers.variables_of(model, described)
    _check(_describe(held), about["variables"], path)
    if (other := built_optimizers.difference(model, described)) is not None:
        raise ValueError(other)
    built_optimizers.reset_undescribed(model, described)
    return held


def _check_built(model: keras.Model, path: pathlib.Path) -> None:
    if not has_weights(model):
        raise errors.CheckpointError(
            runtime.where(),
            f"model {model.name!r} to be built, to restore {path}",
            "a model that is not built",
            "Build the model before fit: model.build(input_shape), or call it on a batch.",
        )


def _check(mine: Sequence[Any], written: Sequence[Any], path: pathlib.Path) -> None:
    """Checks that a backup is of a model and optimizers with the same variables."""

    def kind_of(described: Any) -> tuple[Any, str]:
        _, shape, dtype = described
        return shape, INTEGER.sub("int", str(dtype))  # counters differ between backends

    none: Any = ("none", None, None)
    pairs = itertools.zip_longest(mine, written, fillvalue=none)
    different: Any = next((pair for pair in pairs if kind_of(pair[0]) != kind_of(pair[1])), None)
    if different is None:
        return
    (expected, *kind), (received, *other) = different
    raise errors.CheckpointError(
        runtime.where(),
        f"the {len(mine)} variables of this model and its optimizer in {path}, "
        f"with {expected!r} of shape {kind[0]} and dtype {kind[1]}",
        f"{len(written)} variables, with {received!r} of shape {other[0]} and dtype "
        f"{other[1]} instead",
        REMEDY,
    )


def _describe(variables: Sequence[Any]) -> list[tuple[str, list[int], str]]:
    """Returns names, shapes and dtypes of variables."""
    return [(variable_name(v), list(shape_of(v)), str(v.dtype)) for v in variables]
