"""The variables of a model in a generation: who writes them, and the check that they fit a model.

A rank writes its slices of sharded state. State that is equal on all ranks is dealt by bytes, in
equal ranges. The root writes what differs from rank to rank.
"""

import dataclasses
import itertools
import math
import pathlib
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import errors
from keras_dist._compat.keras.models import has_weights
from keras_dist.resume.format import REMEDY
from keras_dist.resume.read import Contents
from keras_dist.resume.tensor_file import Tensor
from keras_dist.training import built_optimizers, layer_state
from keras_dist.training.model_state import (
    accumulated,
    bytes_of,
    host_array,
    random_states,
    shared_state,
    slice_of,
    to_numpy,
    variable_name,
)
from keras_dist.training.sharded_state import assign, shape_of, whole_value


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements of the flattened value of a variable."""

    index: int
    variable: Any
    low: int
    high: int


def pieces_of_rank(
    variables: Sequence[Any], rank: int, size: int, equal: Collection[int], is_root: bool
) -> list[Piece]:
    """Returns the pieces that a rank writes; `equal` has the ids of what all ranks have alike."""
    dealt = [variable for variable in variables if slice_of(variable) is None]
    dealt = [variable for variable in dealt if id(variable) in equal]
    total = sum(_count_of(variable) * dtype_of(variable).itemsize for variable in dealt)
    low, high = total * rank // size, total * (rank + 1) // size
    known, offset = {id(variable) for variable in dealt}, 0
    found = []
    for index, variable in enumerate(variables):
        count = _count_of(variable)
        if (sliced := slice_of(variable)) is not None:
            part = sliced[0].parts[sliced[1]]
            bounds = part.start, part.stop
        elif id(variable) in known:
            itemsize = dtype_of(variable).itemsize
            begin, end = ((bound - offset) // itemsize for bound in (low, high))
            bounds = min(max(begin, 0), count), min(max(end, 0), count)
            offset += count * itemsize
        else:
            bounds = (0, count) if is_root else (0, 0)
        if bounds[0] < bounds[1]:
            found.append(Piece(index, variable, *bounds))
    return found


def whole_tensors(variables: Iterable[Any]) -> list[Tensor]:
    """Returns the whole values of variables; of slices, in the context `gathered`."""
    return [
        Tensor(f"{index}:0", dtype_of(variable).name, _bytes_of(whole_value(variable)).data)
        for index, variable in enumerate(variables)
    ]


def dtype_of(variable: Any) -> np.dtype:
    """Returns the dtype of a variable."""
    return np.dtype(keras.backend.standardize_dtype(variable.dtype))


class Stage:
    """Memory of copies, used again for each checkpoint: new memory costs more than a copy."""

    def __init__(self) -> None:
        self._copies: list[np.ndarray] = []
        self._making = threading.Thread()

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Makes room for pieces, in a thread, before the first copy needs it."""
        sizes = [(each.high - each.low) * dtype_of(each.variable).itemsize for each in pieces]
        self._making = threading.Thread(target=self._make, args=(sizes,), daemon=True)
        self._making.start()

    def _make(self, sizes: list[int]) -> None:
        # Filled, so that the system provides the memory now.
        self._copies = [np.full(nbytes, 0, np.uint8) for nbytes in sizes]

    def tensors(self, pieces: Sequence[Piece], copies: bool) -> list[Tensor]:
        """Returns what a file holds of pieces."""
        values = [_value_of(piece) for piece in pieces]
        if copies:
            if self._making.is_alive():
                self._making.join()
            sizes = [each.nbytes for each in values]
            if sizes != [each.nbytes for each in self._copies]:
                self._make(sizes)
            for copy, value in zip(self._copies, values, strict=True):
                np.copyto(copy, value)
            values = self._copies
        return [
            Tensor(f"{piece.index}:{piece.low}", dtype_of(piece.variable).name, value.data)
            for piece, value in zip(pieces, values, strict=True)
        ]

    def release(self) -> None:
        """Frees the memory."""
        self._copies = []


def _value_of(piece: Piece) -> np.ndarray:
    found = _bytes_of(host_array(piece.variable))
    if slice_of(piece.variable) is not None:
        return found
    itemsize = dtype_of(piece.variable).itemsize
    return found[piece.low * itemsize : piece.high * itemsize]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _count_of(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))


INTEGER = re.compile(r"u?int\d+")
SEED = "seed"  # prefix of the names of random states
ACCUMULATED = "accumulated"  # prefix of the names of gradients that wait for the next update
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
    # Equal on all ranks, see `average_accumulated`.
    waiting = [bytes_of(to_numpy(variable)) for variable in accumulated(model)]
    found |= {f"{ACCUMULATED}{number}": value for number, value in enumerate(waiting)}
    return {**found, **write_layers(model)}


def restore(model: keras.Model, contents: Contents, is_root: bool, alone: bool = False) -> None:
    """Restores weights, optimizers (of sharded state, slices) and random states of a model."""
    path = contents.generation.path
    try:
        _restore(model, contents, is_root, alone)
    except errors.CheckpointError:
        raise
    except (OSError, ValueError, KeyError) as error:
        expected = f"to read the variables of model {model.name!r} from the checkpoint {path}"
        received = f"{type(error).__name__}: {error}"
        raise errors.CheckpointError(expected, received, REMEDY) from error


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
    for number, variable in enumerate(accumulated(model)):
        if (name := f"{ACCUMULATED}{number}") in arrays:
            variable.assign(arrays[name].view(dtype_of(variable)).reshape(variable.shape))
    restore_layers(model, arrays, is_root)


def fit_to(model: keras.Model, about: Mapping[str, Any], path: pathlib.Path) -> list[Any]:
    """Builds optimizers as described, returns described variables; others become initial."""
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
            f"model {model.name!r} to be built, to restore {path}",
            "a model that is not built",
            "Build the model before fit: call it on a batch.",
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
        f"the {len(mine)} variables of this model and its optimizer in {path}, "
        f"with {expected!r} of shape {kind[0]} and dtype {kind[1]}",
        f"{len(written)} variables, with {received!r} of shape {other[0]} and dtype "
        f"{other[1]} instead",
        REMEDY,
    )


def _describe(variables: Sequence[Any]) -> list[tuple[str, list[int], str]]:
    """Returns names, shapes and dtypes of variables."""
    return [(variable_name(v), list(shape_of(v)), str(v.dtype)) for v in variables]
