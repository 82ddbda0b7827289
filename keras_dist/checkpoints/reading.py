"""Reading the variables of a generation, by any number of ranks and on any backend."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist.checkpoints.pieces import SEED, dtype_of
from keras_dist.storage import tensor_file
from keras_dist.storage.generations import REMEDY, Generation
from keras_dist.training.model_arrays import fit_to, restore_layers
from keras_dist.training.model_state import random_states, shared_state, slice_of
from keras_dist.training.sharded_state import shape_of


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a file holds consecutive elements of a variable, which begin at `low`."""

    low: int
    path: pathlib.Path
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Contents:
    """A generation, and what its parts hold."""

    generation: Generation
    pieces: Mapping[int, Sequence[_Place]]
    others: Mapping[str, _Place]


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of a generation that are not variables, by name; read when they are taken."""

    def __init__(self, contents: Contents):
        self._places = contents.others

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._places[name]
        found = np.empty(place.nbytes, np.uint8)
        tensor_file.read_into(place.path, place.offset, found.data)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places  # that of Mapping would read the array

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def contents_of(generation: Generation) -> Contents:
    """Reads the headers of all parts."""
    pieces: dict[int, list[_Place]] = {}
    others = {}
    for path in generation.parts:
        for name, entry in tensor_file.read_header(path).items():
            index, _, low = name.partition(":")
            if low:
                place = _Place(int(low), path, entry.offset, entry.nbytes)
                pieces.setdefault(int(index), []).append(place)
            else:
                others[name] = _Place(0, path, entry.offset, entry.nbytes)
    for places in pieces.values():
        places.sort(key=lambda place: place.low)
    return Contents(generation, pieces, others)


def restore(model: keras.Model, contents: Contents, is_root: bool) -> None:
    """Restores weights, optimizers and random states of a model. Each rank reads for itself.

    Of optimizers that shard their state it reads its slices.
    """
    path = contents.generation.path
    try:
        _restore(model, contents, is_root)
    except errors.CheckpointError:
        raise
    except (OSError, ValueError) as error:
        expected = f"to read the variables of model {model.name!r} from the checkpoint {path}"
        text = errors.explain(runtime.where(), expected, f"{type(error).__name__}: {error}", REMEDY)
        raise errors.CheckpointError(text) from error


def _restore(model: keras.Model, contents: Contents, is_root: bool) -> None:
    about, path = contents.generation.about, contents.generation.path
    held = fit_to(model, about, path, any_integers=True)
    equal = {id(variable) for variable in shared_state(model)}
    for index, variable in enumerate(held):
        if is_root or id(variable) in equal or slice_of(variable) is not None:
            stored = np.dtype(about["variables"][index][2])
            places = contents.pieces.get(index, ())
            _assign(variable, functools.partial(_read, places, stored, path, about, index))
    arrays = Arrays(contents)
    for number, generator in enumerate(random_states(model)):
        if (name := f"{SEED}{number}") in arrays:
            value = arrays[name].view(about["seed dtypes"][number])
            generator.assign(value.astype(dtype_of(generator)).reshape(generator.shape))
    restore_layers(model, arrays, is_root)


def _assign(variable: Any, read: Callable[[int, int], np.ndarray]) -> None:
    """Assigns elements to a variable: those of its slice, or all."""
    sliced = slice_of(variable)
    if sliced is None:
        count = int(np.prod(variable.shape, dtype=np.int64))
        value = read(0, count).reshape(shape_of(variable))
    else:
        part = sliced[0].parts[sliced[1]]
        value = read(part.start, part.stop)
    variable.assign(value.astype(dtype_of(variable), copy=False))


def _read(
    places: Sequence[_Place],
    dtype: np.dtype,
    path: pathlib.Path,
    about: Mapping[str, Any],
    index: int,
    low: int,
    high: int,
) -> np.ndarray:
    """Returns the elements of a variable from `low` to `high`."""
    found, itemsize, at = np.empty(high - low, dtype), dtype.itemsize, low
    target = found.view(np.uint8).data
    for place in places:
        end = min(high, place.low + place.nbytes // itemsize)
        if place.low <= at < end:
            begin = (at - low) * itemsize
            source = place.offset + (at - place.low) * itemsize
            tensor_file.read_into(place.path, source, target[begin : (end - low) * itemsize])
            at = end
    if at < high:
        raise errors.CheckpointError(
            runtime.where(),
            f"all elements of {about['variables'][index][0]!r} in the checkpoint {path}",
            f"none from element {at} on",
            REMEDY,
        )
    return found
