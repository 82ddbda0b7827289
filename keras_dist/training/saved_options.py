"""Reduction options as JSON, in saved models and in the copies of an optimizer that Keras makes.

Variables and layers are identified by their path and by their index among the optimizer's
variables. The index takes precedence, as when Keras loads the state of an optimizer: paths of
automatically named layers may differ. Keras copies an optimizer by its configuration or by a saved
file. The text travels with both: with the keys of the configuration, which equal those of plain
Keras, and among the assets of the file. A process without keras_dist ignores it.
"""

import functools
import json
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.models import layers_of
from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist._compat.keras.optimizers import make_unpickler
from keras_dist.runtime.process_sets import format_ranks
from keras_dist.training.model_state import keras_variables, layer_name, variable_name

# File name among the assets of a saved optimizer.
FILE = "keras_dist.json"

VERSION = 1
REMEDY = "Pass the argument to load_model, or save the model again."


# --- Reading


def parse(text: str | bytes) -> dict[str, Any]:
    """Parses the text of a `KeepsOptions`; raises a `ValueError` for another text or version."""
    saved = json.loads(text)
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        version = saved.get("version") if isinstance(saved, dict) else saved
        raise ValueError(f"{FILE} has version {version!r}; this keras_dist reads {VERSION}")
    return saved


def read(
    saved: dict[str, Any],
    model: keras.Model | None,
    variables: Sequence[Any],
    given: Collection[str] = (),
) -> tuple[dict[str, Any], list[Any], list[keras.Layer]]:
    """Returns arguments of `DistributedOptimizer` not `given`, local variables and layers."""
    names = (
        "op process_set compression backward_passes_per_step average_aggregated_gradients "
        "gradient_predivide_factor sparse_as_dense groups scale_local_gradients shard_state "
        "local_steps"
    )
    known = {"shard_state": False, "local_steps": None} | saved  # files of earlier versions lack it
    found = {name: known[name] for name in names.split() if name not in given}
    if "process_set" in found:
        found["process_set"] = find_set(found["process_set"])
    if "compression" in found:
        found["compression"] = _find_compression(found["compression"])
    if isinstance(groups := found.get("groups"), list):
        found["groups"] = [[_find_variable(item, variables) for item in each] for each in groups]
    local = [_find_variable(item, variables) for item in saved["local_variables"]]
    # Layers are found by their variables.
    if model is None:
        return found, local + _variables_of_layers(saved["local_layers"], variables), []
    return found, local, [_find_layer(item, model, variables) for item in saved["local_layers"]]


def _variables_of_layers(layers: list[dict[str, Any]], variables: Sequence[Any]) -> list[Any]:
    for layer in layers:
        if not layer["indices"] or max(layer["indices"]) >= len(variables):
            raise errors.UsageError(
                f"the local layer {layer['path']!r} of the copy of an optimizer",
                "an update by the optimizer alone, which does not know its model",
                "Wrap the copy in keras_dist.PartialDistributedOptimizer, with local_layers.",
            )
    return [variables[index] for layer in layers for index in layer["indices"]]


def find_set(sets: list[list[int]]) -> Any:
    """Returns the process set of saved ranks; `None` for all ranks."""
    if not sets:
        return None
    found = runtime.find_process_set([tuple(ranks) for ranks in sets])
    if found is None:
        listed = " and ".join(format_ranks(ranks) for ranks in sets)
        raise errors.ArgumentError(
            f"a process set of {listed}, as when the optimizer was saved",
            "none",
            "Call keras_dist.add_process_set on every rank first, or pass another process_set "
            "to load_model, None for all ranks.",
        )
    return found


def _find_compression(name: str) -> _engine.Compressor | _engine.GradientCompression:
    try:
        return _engine.parse_gradient_compression(name, runtime.where())
    except errors.ArgumentError as error:
        raise errors.ArgumentError(
            f"the compression {name} as an argument, as when the optimizer was saved",
            "none",
            "Pass an instance of that class, or another compression, to load_model or, for "
            "a copy, to DistributedOptimizer.",
        ) from error


def _indices(variables: Sequence[Any]) -> dict[int, int]:
    return {id(variable): index for index, variable in enumerate(variables)}


def _indices_of(layer: keras.Layer, indices: dict[int, int]) -> list[int]:
    return [indices[id(v)] for v in layer.trainable_variables if id(v) in indices]


def _find_variable(saved: dict[str, Any], variables: Sequence[Any]) -> Any:
    path, index = saved["path"], saved["place"]
    if index is not None and index < len(variables):
        return variables[index]
    found = [variable for variable in variables if _same_path(variable_name(variable), path)]
    if index is not None or len(found) != 1:
        raise _missing(f"the variable {path!r}", len(variables), "trainable variables")
    return found[0]


def _find_layer(saved: dict[str, Any], model: keras.Model, variables: Sequence[Any]) -> keras.Layer:
    layers, indices = layers_of(model), _indices(variables)
    # A layer that was saved unbuilt or frozen is identified by its path only.
    wanted = saved["indices"]
    matching = [item for item in layers if not wanted or _indices_of(item, indices) == wanted]
    named = [item for item in matching if _same_path(layer_name(item), saved["path"])]
    found = named or (matching if wanted else [])
    if not found:
        raise _missing(f"the layer {saved['path']!r}", len(matching), "layers")
    return found[0]


def _same_path(path: str, other: str) -> bool:
    """Returns whether paths are equal up to a leading `Sequential`, which loading may change."""
    return f"/{path}".endswith(f"/{other}") or f"/{other}".endswith(f"/{path}")


def _missing(name: str, count: int, kind: str) -> errors.CheckpointError:
    expected = f"{name} in the loaded model, for the options of its optimizer"
    return errors.CheckpointError(expected, f"{count} other {kind}", REMEDY)


# --- Copies


class KeepsOptions:
    """Base mixin of optimizers whose copies have the same options; precedes the user's class."""

    _keras_dist: Any  # a `GradientReduction`

    def _keras_dist_text(self) -> str:
        """Returns the options as JSON text."""
        mine, options, variables = self._keras_dist, self._keras_dist.options, trained_by(self)
        indices = _indices(variables)

        def described(those: Iterable[Any]) -> list[dict[str, Any]]:
            return [{"path": variable_name(v), "place": indices.get(id(v))} for v in those]

        groups: Any = options.groups
        if not isinstance(groups, int):
            groups = list(map(described, groups)) or None
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
                "local_steps": options.local_steps and options.local_steps.get_config(),
                "local_variables": described(keras_variables(variables, mine.registered)),
                "local_layers": [
                    {"path": layer_name(layer), "indices": _indices_of(layer, indices)}
                    for layer in mine.local_layers
                ],
            },
            indent=2,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the user's class; its copies have the same options."""
        text = self._keras_dist_text()
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {_Key.of(key, text): value for key, value in config.items()}

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates an optimizer of the user's class from a configuration."""
        return base_of(cls).from_config(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles an optimizer of the user's class, with the options among its assets."""
        arguments = super().__reduce__()[1]
        return make_unpickler(base_of(type(self))), arguments

    def save_assets(self, directory: str) -> None:
        """Writes the options. Keras calls this method when it saves a model."""
        if hasattr(super(), "save_assets"):
            super().save_assets(directory)  # type: ignore[misc]
        pathlib.Path(directory, FILE).write_text(self._keras_dist_text())


def base_of(cls: type) -> Any:
    """Returns the user's class of a class made by `derived`."""
    return cls.__bases__[1]


@functools.cache
def derived(base: Any, mixin: Any) -> Any:
    """Returns a subclass of an optimizer's class with the same name and module."""
    made = type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__},
    )
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        # Both classes are saved under the registered name, which loads the user's class.
        for registered in (made, base):
            keras.saving.register_keras_serializable(package, name)(registered)
    return made


class _Key(str):
    """A key of the configuration of an optimizer, with the text of its options."""

    text: str

    @staticmethod
    def of(key: str, text: str) -> "_Key":
        made = _Key(key)
        made.text = text
        return made

    def __deepcopy__(self, memo: Any) -> "_Key":
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)  # a pickled configuration loads without keras_dist


def text_in(config: Mapping[str, Any]) -> str | None:
    """Returns the options in the keys of a configuration; `None` if there are none."""
    return next((key.text for key in config if isinstance(key, _Key)), None)


def plain_config(optimizer: Any) -> dict[str, Any]:
    """Returns the configuration of an optimizer without options, which makes a plain one."""
    plain: dict[str, Any] = _without_options(optimizer.get_config())
    return plain


def _without_options(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_options(item) for key, item in value.items()}
    return [_without_options(item) for item in value] if isinstance(value, list) else value
