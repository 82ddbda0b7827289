"""Reduction options as JSON, saved beside the state of an optimizer.

Variables and layers are identified by their path and by their index among the optimizer's
variables. The index takes precedence, as when Keras loads the state of an optimizer: paths of
automatically named layers may differ.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.models import layers_of
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.runtime.process_sets import format_ranks
from keras_dist.training.model_state import variable_name

# File name among the assets of a saved optimizer.
FILE = "keras_dist.json"

VERSION = 1
REMEDY = "Pass the argument to load_model, or save the model again."


# --- Writing


def describe(
    options: ReductionOptions,
    variables: Sequence[Any],
    local_variables: Sequence[Any],
    local_layers: Sequence[keras.Layer],
) -> str:
    """Returns the options as JSON text."""
    indices = _indices(variables)
    groups: Any = options.groups
    if not isinstance(groups, int):
        groups = [[_describe_variable(v, indices) for v in group] for group in groups] or None
    return json.dumps(
        {
            "version": VERSION,
            "op": options.op.value,
            "process_set": [list(ranks) for ranks in options.sets],
            "compression": options.compression.name,
            "backward_passes_per_step": options.passes,
            "average_aggregated_gradients": options.averages,
            "gradient_predivide_factor": options.predivide,
            "sparse_as_dense": options.sparse_as_dense,
            "groups": groups,
            "scale_local_gradients": options.scale_local,
            "shard_state": options.shard_state,
            "local_variables": [_describe_variable(v, indices) for v in local_variables],
            "local_layers": [
                {"path": _path(layer), "indices": _indices_of(layer, indices)}
                for layer in local_layers
            ],
        },
        indent=2,
    )


def _describe_variable(variable: Any, indices: dict[int, int]) -> dict[str, Any]:
    return {"path": variable_name(variable), "place": indices.get(id(variable))}


def _indices(variables: Sequence[Any]) -> dict[int, int]:
    return {id(variable): index for index, variable in enumerate(variables)}


def _indices_of(layer: keras.Layer, indices: dict[int, int]) -> list[int]:
    return [indices[id(v)] for v in layer.trainable_variables if id(v) in indices]


# --- Reading


def parse(text: str | bytes) -> dict[str, Any]:
    """Parses the text of `describe`.

    Raises:
        ValueError: the text is not from `describe`, or from a later version.
    """
    saved = json.loads(text)
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        version = saved.get("version") if isinstance(saved, dict) else saved
        raise ValueError(f"{FILE} has version {version!r}; this keras_dist reads {VERSION}")
    return saved


def settings(
    saved: dict[str, Any], variables: Sequence[Any], given: Collection[str], where: str
) -> dict[str, Any]:
    """Returns the arguments of `DistributedOptimizer` that were saved.

    Args:
        saved: from `parse`.
        variables: the loaded optimizer's variables, in its order.
        given: names of arguments that the user passes, which are left out.
        where: the location for error messages.

    Raises:
        ArgumentError: a process set does not exist, or a compression is not known by name.
        CheckpointError: a variable does not exist.
        KeyError: `saved` lacks an entry.
    """
    read: dict[str, Any] = {
        "process_set": lambda ranks: _find_set(ranks, where),
        "compression": lambda name: _find_compression(name, where),
        "groups": lambda groups: _find_groups(groups, variables, where),
    }
    names = (
        "op process_set compression backward_passes_per_step average_aggregated_gradients "
        "gradient_predivide_factor sparse_as_dense groups scale_local_gradients shard_state"
    )
    known = {"shard_state": False} | saved  # files of earlier versions lack it
    return {
        name: read.get(name, lambda value: value)(known[name])
        for name in names.split()
        if name not in given
    }


def local_state(
    saved: dict[str, Any], model: keras.Model | None, variables: Sequence[Any], where: str
) -> tuple[list[Any], list[keras.Layer]]:
    """Returns the local variables and the local layers that were saved."""
    known = [_find_variable(item, variables, where) for item in saved["local_variables"]]
    if model is None:
        return known + _variables_of_layers(saved["local_layers"], variables, where), []
    layers = [_find_layer(item, model, variables, where) for item in saved["local_layers"]]
    return known, layers


def _variables_of_layers(
    layers: list[dict[str, Any]], variables: Sequence[Any], where: str
) -> list[Any]:
    for layer in layers:
        if not layer["indices"] or max(layer["indices"]) >= len(variables):
            raise errors.UsageError(
                where,
                f"the local layer {layer['path']!r} of the copy of an optimizer",
                "an update by the optimizer alone, which does not know its model",
                "Wrap the copy in keras_dist.PartialDistributedOptimizer, with local_layers.",
            )
    return [variables[index] for layer in layers for index in layer["indices"]]


def _find_set(sets: list[list[int]], where: str) -> Any:
    if not sets:
        return None
    found = runtime.find_process_set([tuple(ranks) for ranks in sets])
    if found is None:
        listed = " and ".join(format_ranks(ranks) for ranks in sets)
        raise errors.ArgumentError(
            where,
            f"a process set of {listed}, as when the optimizer was saved",
            "none",
            "Call keras_dist.add_process_set on every rank first, or pass another process_set "
            "to load_model, None for all ranks.",
        )
    return found


def _find_compression(name: str, where: str) -> _engine.Compressor:
    try:
        return _engine.parse_compression(name, where)
    except errors.ArgumentError as error:
        raise errors.ArgumentError(
            where,
            f"the compression {name} as an argument, as when the optimizer was saved",
            "none",
            "Pass an instance of that class, or another compression, to load_model or, for "
            "a copy, to DistributedOptimizer.",
        ) from error


def _find_groups(groups: Any, variables: Sequence[Any], where: str) -> Any:
    if not isinstance(groups, list):
        return groups
    return [[_find_variable(item, variables, where) for item in group] for group in groups]


def _find_variable(saved: dict[str, Any], variables: Sequence[Any], where: str) -> Any:
    path, index = saved["path"], saved["place"]
    if index is not None and index < len(variables):
        return variables[index]
    found = [variable for variable in variables if _same_path(variable_name(variable), path)]
    if index is not None or len(found) != 1:
        raise _missing(f"the variable {path!r}", len(variables), "trainable variables", where)
    return found[0]


def _find_layer(
    saved: dict[str, Any], model: keras.Model, variables: Sequence[Any], where: str
) -> keras.Layer:
    layers, indices = layers_of(model), _indices(variables)
    # A layer that was saved unbuilt or frozen is identified by its path only.
    wanted = saved["indices"]
    matching = [item for item in layers if not wanted or _indices_of(item, indices) == wanted]
    named = [item for item in matching if _same_path(_path(item), saved["path"])]
    found = named or (matching if wanted else [])
    if not found:
        raise _missing(f"the layer {saved['path']!r}", len(matching), "layers", where)
    return found[0]


def _path(layer: keras.Layer) -> str:
    return layer.path or layer.name  # an unbuilt layer has no path


def _same_path(path: str, other: str) -> bool:
    """Returns whether paths are equal up to a leading `Sequential`, which loading may change."""
    return f"/{path}".endswith(f"/{other}") or f"/{other}".endswith(f"/{path}")


def _missing(name: str, count: int, kind: str, where: str) -> errors.CheckpointError:
    expected = f"{name} in the loaded model, for the options of its optimizer"
    return errors.CheckpointError(where, expected, f"{count} other {kind}", REMEDY)
