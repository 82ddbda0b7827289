"""ZeRO-1: each rank keeps and updates a slice of the variables of an optimizer, see decision 49."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import _backends, _engine, config, errors
from keras_dist._compat.keras.optimizer_state import (
    batches_seen,
    is_overwritten,
    trained_by,
    variable_index,
)
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER
from keras_dist._compat.keras.sliced_updates import (
    ELEMENTWISE,
    SliceHook,
    averages,
    key_of,
    updates_elementwise,
)
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.training import sharded_state
from keras_dist.training.model_state import untrained_zeros, variable_name

ACCUMULATOR = "gradient_accumulator"  # Keras' name of variables for gradients of this rank
WITHOUT = "Omit shard_state, which is off by default."
SAME = "Pass the same shard_state on every rank, and build the same model."


class Shards:
    """The slices of the variables of one optimizer that this rank updates."""

    def __init__(
        self,
        variables: Sequence[Any],
        ranks: Callable[[], _engine.Communicator],
        steps: Callable[[], int],
    ):
        self._ranks, self._steps = ranks, steps
        comm = ranks()
        self.rank, self.size = comm.rank, comm.size
        #: indices of the variables that are cut; Keras assigns the others their gradients
        self.indices = [i for i, v in enumerate(variables) if not is_overwritten(v)]
        self.variables = list(variables)
        self._index_of = {id(variables[index]): index for index in self.indices}
        cut = [variables[index] for index in self.indices]
        #: their shapes, by index
        self.shapes = {i: tuple(v.shape) for i, v in zip(self.indices, cut, strict=True)}
        self._gather = _engine.FusedAllgather(
            comm,
            [variable_name(variable) for variable in cut],
            # Values cannot be read where TensorFlow builds the optimizer in a graph.
            [(tuple(v.shape), np.dtype(keras.backend.standardize_dtype(v.dtype))) for v in cut],
            "the gathering of updated weights",
            SAME,
            self.ranks,
        )
        self.parts = {
            index: self._gather.part(number, comm.rank) for number, index in enumerate(self.indices)
        }
        self.slices = {
            index: untrained_zeros(variables[index], (part.stop - part.start,))
            for index, part in self.parts.items()
        }
        # Whole values that this rank has read from a file, by id of the slice, and at which step.
        self._loaded: dict[int, np.ndarray] = {}
        self._loaded_at = 0

    def index_of(self, variable: Any) -> int | None:
        """Returns the index of a variable that is cut, or `None`."""
        return self._index_of.get(id(variable))

    def cut(self, tensor: Any, index: int) -> Any:
        """Returns the part of a tensor, of the shape of a variable, that this rank updates."""
        flat = ops.reshape(ops.stop_gradient(ops.convert_to_tensor(tensor)), (-1,))
        return flat[self.parts[index]]

    def refresh(self) -> None:
        """Sets the slices to the values of the variables, which scripts may have assigned."""
        for index, part in self.slices.items():
            part.assign(self.cut(self.variables[index], index))

    def gather(self) -> None:
        """Assigns the updated slices of all ranks to the variables, inside a train step."""
        slices = [self.slices[index].value for index in self.indices]
        shapes = [self.shapes[index] for index in self.indices]
        wholes = _backends.active().call_host(self._gathered, slices, shapes)
        for index, whole in zip(self.indices, wholes, strict=True):
            self.variables[index].assign(whole)

    def _gathered(self, *slices: np.ndarray) -> list[np.ndarray]:
        return self._gather(slices)

    def keep_loaded(self, variable: Any, value: np.ndarray) -> None:
        """Keeps the whole value of a slice until the state is shared, or until the next step."""
        self._loaded[id(variable)], self._loaded_at = value, self._steps()

    def loaded(self, variable: Any) -> np.ndarray | None:
        """Returns the whole value that was read for a slice, if no step has changed it since."""
        return self._loaded.get(id(variable)) if self._loaded_at == self._steps() else None

    def forget_loaded(self) -> None:
        """Frees the whole values."""
        self._loaded.clear()

    def ranks(self) -> _engine.Communicator:
        comm = self._ranks()
        if (comm.rank, comm.size) != (self.rank, self.size):
            raise errors.BackendError(
                f"{self.size} ranks, over which the state of the optimizer is sharded",
                f"{comm.size} ranks",
                "Save the model, and load it on the new ranks.",
            )
        return comm


class Sharded(SliceHook):
    """Mixin of a distributed optimizer that shards its state; precedes the other mixins."""

    _keras_dist: Any

    def build(self, variables: Any) -> None:
        """Makes the slices of the variables, and the state for them."""
        reduction = self._keras_dist
        if not self.built and reduction.communicator() is not None:  # type: ignore[attr-defined]
            reduction.shards = _shards(self, variables)
        super().build(variables)  # type: ignore[misc]

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, *rest: Any, **options: Any
    ) -> Any:
        """Makes a state variable for the slice of a variable."""
        shards, make = self._keras_dist.shards, super().add_variable_from_reference  # type: ignore[misc]
        index = None if shards is None else shards.index_of(reference_variable)
        if index is None or name == ACCUMULATOR:
            return make(reference_variable, name, *rest, **options)
        created = make(shards.slices[index], name, *rest, **options)
        sharded_state.mark(created, shards, index)
        return created

    def save_own_variables(self, store: Any) -> None:
        """Writes the whole state. Collective: every rank, unless the state is gathered already."""
        for index, variable in enumerate(self.variables):  # type: ignore[attr-defined]
            store[str(index)] = sharded_state.whole_value(variable)

    def load_own_variables(self, store: Any) -> None:
        """Reads a whole state and keeps the slices of this rank."""
        if len(store.keys()) != len(self.variables):  # type: ignore[attr-defined]
            super().load_own_variables(store)  # type: ignore[misc]
            return
        for index, variable in enumerate(self.variables):  # type: ignore[attr-defined]
            sharded_state.assign(variable, np.asarray(store[str(index)]))

    def _keras_dist_slices(self, gradients: Any, variables: Any) -> Any:
        shards = self._keras_dist.shards
        if shards is None:
            return None
        shards.forget_loaded()
        shards.refresh()
        # Rows of an embedding travel as rows; the update of a slice needs no rows.
        dense = _backends.active().as_dense(gradients)
        indices = [variable_index(self, variable) for variable in variables]
        parts = [shards.cut(g, index) for g, index in zip(dense, indices, strict=True)]
        return parts, [shards.slices[index] for index in indices]

    def _keras_dist_join(self) -> None:
        self._keras_dist.shards.gather()

    @functools.cached_property
    def _keras_dist_keys(self) -> dict[Any, int]:
        slices = self._keras_dist.shards.slices
        return {key_of(self, part): index for index, part in slices.items()}

    def _keras_dist_index(self, key: Any) -> int | None:
        return None if self._keras_dist.shards is None else self._keras_dist_keys.get(key)

    def _keras_dist_current(self, variables: Any) -> Any:
        shards = self._keras_dist.shards
        if shards is None:
            return None
        if variables:
            shards.refresh()
        return [shards.slices.get(variable_index(self, variable)) for variable in variables]

    def _keras_dist_whole_averages(self) -> Any:
        if self._keras_dist.shards is None:
            return None
        return [None if a is None else sharded_state.whole_value(a) for a in averages(self)]


def convert(optimizer: Any) -> None:
    """Cuts the state of an optimizer that was built before it was sharded."""
    reduction = optimizer._keras_dist
    if reduction.communicator() is None:
        return
    reduction.shards = _shards(optimizer, trained_by(optimizer))
    sharded_state.cut_state(optimizer, reduction.shards)


def _shards(optimizer: Any, variables: Sequence[Any]) -> Shards:
    counter, options = batches_seen(optimizer), optimizer._keras_dist.options
    return Shards(variables, options.ranks, lambda: int(counter))


def check_shardable(optimizer: Any, options: ReductionOptions) -> None:
    """Checks that an optimizer and options permit `shard_state`."""
    check_unscaled(optimizer)
    name = type(optimizer).__name__
    if isinstance(optimizer, MULTI_OPTIMIZER):
        _refuse("a single optimizer", f"a {name}", WITHOUT)
    if not updates_elementwise(optimizer):
        expected = f"one of Keras' optimizers {', '.join(ELEMENTWISE)}"
        _refuse(expected, f"{name}, which may update elements by others", WITHOUT)
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        received = f"ema_overwrite_frequency={optimizer.ema_overwrite_frequency}"
        remedy = "Omit it: averaged weights are assigned at the end of fit. Or omit shard_state."
        _refuse("no ema_overwrite_frequency", received, remedy)
    if options.process_set is not None:
        _refuse("all ranks to reduce", "a process_set", WITHOUT)
    settings = config.settings()
    remedy = "Unset it, and use BackupAndRestore with keras-dist run --max-restarts."
    if settings.on_failure != "stop":
        received = f"KERAS_DIST_ON_FAILURE={settings.on_failure}"
        _refuse("that the job ends if a rank dies, with its slice", received, remedy)


def check_unscaled(optimizer: Any) -> None:
    """Checks that the loss is not scaled."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        remedy = "Use mixed_bfloat16, which needs no loss scale, or omit shard_state."
        _refuse("no dynamic loss scale", "a LossScaleOptimizer", remedy)


def check_no_local_variables(options: ReductionOptions) -> None:
    """Checks that local variables are not combined with `shard_state`."""
    if options.shard_state:
        received = "local variables, which no other rank could update"
        _refuse("variables that all ranks share", received, WITHOUT)


def _refuse(expected: str, received: str, remedy: str) -> None:
    expected = f"{expected}, with shard_state=True"
    raise errors.ArgumentError(expected, received, remedy)
