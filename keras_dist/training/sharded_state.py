"""The state of optimizers that shard it: files hold whole values, a rank its part of each, flat."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.optimizer_state import accumulators, slots, trained_by
from keras_dist._compat.keras.sliced_updates import replace_state
from keras_dist.training.model_state import SLICE, optimizers_of, slice_of, to_numpy, variable_name

# On a rank that is about to write a file: whole values by the id of the state variable.
_whole: dict[int, np.ndarray] = {}


def mark(variable: Any, shards: Any, index: int) -> None:
    """Marks a state variable as the slice for a variable."""
    object.__setattr__(variable, SLICE, (shards, index))


def shape_of(variable: Any) -> tuple[int, ...]:
    """Returns the shape of a variable, or of the whole value if it is a slice."""
    found = slice_of(variable)
    shape = variable.shape if found is None else found[0].shapes[found[1]]
    return tuple(shape)


def whole_value(variable: Any) -> np.ndarray:
    """Returns the value of a variable, of a slice the whole: collective, unless `gathered`."""
    found = slice_of(variable)
    if found is None or id(variable) in _whole:
        return _whole.get(id(variable), to_numpy(variable))
    shards, index = found
    flat = _engine.collectives.allgather(
        shards.ranks(), to_numpy(variable), f"the state of the optimizer, {variable_name(variable)}"
    )
    return flat.reshape(shards.shapes[index])


def assign(variable: Any, value: np.ndarray) -> None:
    """Assigns a whole value to a variable, or the part of this rank if it is a slice."""
    found = slice_of(variable)
    if found is None:
        variable.assign(value)
        return
    shards, index = found
    variable.assign(value.reshape(-1)[shards.parts[index]])
    # Until it is shared, or until the next update: no other rank may have read the file.
    shards.keep_loaded(variable, value)


def cut_state(optimizer: Any, shards: Any) -> None:
    """Replaces the state variables of a built optimizer by slices."""
    trained = trained_by(optimizer)
    others = {id(variable) for variable in (*trained, *accumulators(optimizer))}
    replaced: dict[int, Any] = {}
    for kind in slots(optimizer, len(trained)):
        for index, variable in enumerate(kind):
            if isinstance(variable, keras.Variable) and id(variable) not in others:
                whole = to_numpy(variable)
                part = keras.Variable(
                    whole.reshape(-1)[shards.parts[index]],
                    dtype=variable.dtype,
                    trainable=False,
                    name=variable.name,
                )
                mark(part, shards, index)
                shards.keep_loaded(part, whole)
                replaced[id(variable)] = part
    replace_state(optimizer, replaced)


@contextlib.contextmanager
def gathered(model: keras.Model, root_rank: int = 0) -> Iterator[None]:
    """Returns a context in which the root can write the whole state. Collective; blocks."""
    for variable in _slices_of(model):
        value = whole_value(variable)
        if runtime.rank() == root_rank:
            _whole[id(variable)] = value
    try:
        yield
    finally:
        _whole.clear()


def share_loaded(model: keras.Model, root_rank: int) -> None:
    """Gives every rank its slices of the state that the root has read. Collective; blocks."""
    variables = _slices_of(model)
    if not variables:
        return
    comm = runtime.communicator()
    root = comm.index_of_root(root_rank)
    mine = [slice_of(variable)[0].loaded(variable) for variable in variables]  # type: ignore[index]
    have = _engine.collectives.allgather_object(
        comm,
        [value is not None for value in mine],
        operation="the broadcast of the sharded state of an optimizer",
    )
    if not any(map(any, have)):  # what no rank has read stays: it differs from rank to rank
        return
    if not all(have[root]):
        ranks = ", ".join(str(rank) for rank, each in enumerate(have) if any(each))
        raise errors.MismatchError(
            f"rank {root_rank} to have loaded the state of the optimizer, which it broadcasts",
            f"state that was loaded on ranks {ranks} alone",
            "Load the model on the root, or on every rank.",
        )
    for variable, value in zip(variables, mine, strict=True):
        empty = np.empty(shape_of(variable), to_numpy(variable).dtype)
        [whole] = _engine.collectives.broadcast(
            comm, [empty if value is None else value], [variable_name(variable)], root_rank
        )
        assign(variable, whole)
        slice_of(variable)[0].forget_loaded()  # type: ignore[index]


def _slices_of(model: keras.Model) -> list[Any]:
    """Returns the state variables of a model that are slices."""
    return [
        variable
        for optimizer in optimizers_of(model)
        for variable in optimizer.variables
        if slice_of(variable) is not None
    ]


def whole_nbytes(variable: Any) -> int:
    """Returns the size in bytes of a variable, or of the whole value if it is a slice."""
    return math.prod(shape_of(variable)) * to_numpy(variable).dtype.itemsize
