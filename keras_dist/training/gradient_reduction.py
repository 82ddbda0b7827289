"""Reduction of an optimizer's gradients over the ranks. Called by `distributed`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.optimizer_state import is_overwritten
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.ops.gradient_plans import GradientPlans
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.runtime.process_sets import ProcessSet
from keras_dist.training.model_state import variable_name

__all__ = ["GradientReduction", "check_not_reduced", "mark_reduced", "sum_over_ranks"]

# Attribute of a gradient that a tape has reduced.
REDUCED = "_keras_dist_reduced"


class GradientReduction:
    """The reduction of one optimizer's gradients; caches its plans.

    Args:
        options: how gradients are reduced.
        local_layers: layers whose variables each rank keeps for itself.
    """

    def __init__(self, options: ReductionOptions, local_layers: Sequence[keras.Layer] = ()):
        self.options = options
        self.local_layers = local_layers
        self.registered: list[Any] = []
        self.variables: Sequence[Any] = ()
        self.has_reduced = False  # in the current update
        self._plans = GradientPlans(options)

    def communicator(self) -> _engine.Communicator | None:
        """Returns the communicator for the reduction; `None` if there is no other rank.

        Raises:
            ArgumentError: the process set was removed.
        """
        if not runtime.includes_me(self.options.process_set):
            return None
        comm = self.options.ranks()
        return comm if comm.size > 1 else None

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], when: Any = None
    ) -> list[Any]:
        """Reduces gradients, one for each variable; `None` stays `None`.

        Args:
            gradients: this rank's gradients.
            variables: the variables of the gradients, in the same order.
            when: see `Backend.reduce_gradients`.

        Raises:
            ArgumentError: a tape has reduced the gradients, or the numbers of gradients and
                variables differ.
        """
        comm = self.communicator()
        self.has_reduced = True
        check_not_reduced(gradients)
        gradients = self.overwriting(gradients, variables)
        options, backend = self.options, _backends.active()
        local = {id(variable) for variable in self.local_variables()}
        mine = [id(variable) in local or comm is None for variable in variables]
        result = list(gradients)

        def replace(positions: Sequence[int], change: Callable[[list[Any]], list[Any]]) -> None:
            changed = change([result[position] for position in positions])
            for position, gradient in zip(positions, changed, strict=True):
                result[position] = gradient

        present = [
            place
            for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and not is_overwritten(variable)
        ]
        alone = [i for i in present if mine[i]]
        shared = [i for i in present if not mine[i]]
        if options.dense:
            replace(present, backend.as_dense)
        if options.factor != 1:
            replace(present, functools.partial(backend.multiply, factor=options.factor))
        replace(alone, backend.coalesce)
        if comm is None:
            return result
        if options.scale_local:
            replace(alone, functools.partial(backend.multiply, factor=1 / comm.size))
        of = [variables[i] for i in shared]
        replace(
            shared,
            lambda those: backend.reduce_gradients(
                those,
                [_name(variable) for variable in of],
                of,
                functools.partial(self._plan, comm, of),
                self._reduce_slices,
                when,
            ),
        )
        return result

    def overwriting(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Takes the maximum over the ranks of gradients that Keras assigns to their variables.

        These are the amax history and scales of float8 layers. Other gradients are unchanged.

        Raises:
            ArgumentError: the numbers of gradients and variables differ.
        """
        _check_as_many(gradients, variables)
        result = list(gradients)
        present = [at for at, gradient in enumerate(gradients) if gradient is not None]
        every = [at for at in present if is_overwritten(variables[at])]
        if not every or self.communicator() is None:
            return result
        self.has_reduced = self.has_reduced or every == present
        local = {id(variable) for variable in self.local_variables()}
        places = [at for at in every if id(variables[at]) not in local]
        if not places:
            return result
        flat = [ops.reshape(ops.cast(result[at], "float32"), (-1,)) for at in places]
        name = "the largest magnitudes for float8"
        most = _over_ranks(
            self.options.process_set, ops.concatenate(flat), _engine.ReduceOp.MAX, name
        )
        ends = np.cumsum([math.prod(variables[at].shape) for at in places])
        for at, part in zip(places, ops.split(most, ends[:-1].tolist()), strict=True):
            like = result[at]
            result[at] = ops.cast(ops.reshape(part, variables[at].shape), like.dtype)
        # Host operations must run in the same order on every rank.
        later = [at for at in present if at not in every]
        waiting = _backends.active().after(most, [result[at] for at in later])
        for at, gradient in zip(later, waiting, strict=True):
            result[at] = gradient
        return result

    def agreed(self, condition: Any) -> Any:
        """Returns, inside a training step, whether a condition holds on all ranks."""
        if self.communicator() is None:
            return condition
        missing = 1.0 - ops.cast(ops.reshape(condition, (1,)), "float32")
        return ops.all(
            sum_over_ranks(self.options.process_set, missing, "whether gradients are finite") == 0
        )

    def local_variables(self) -> list[Any]:
        """Returns the local variables, as far as layers are built."""
        return self.registered + [v for one in self.local_layers for v in one.trainable_variables]

    def _plan(
        self,
        comm: _engine.Communicator,
        variables: Sequence[Any],
        positions: Sequence[int],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
    ) -> _engine.FusedAllreduce:
        names = [_name(variables[position]) for position in positions]
        groups = self.options.grouped([variables[position] for position in positions])
        return self._plans(comm, names, specs, groups)

    def _reduce_slices(
        self, name: str, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        comm = self.options.ranks()  # resolved now: a graph may outlive its communicator
        options = _engine.OpOptions(self.options.op)
        return _engine.collectives.reduce_slices(comm, values, indices, name, options, notices=True)


def mark_reduced(gradients: list[Any]) -> list[Any]:
    """Marks gradients as reduced, so that they are not reduced twice; returns them."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, REDUCED, True)
    return gradients


def check_not_reduced(gradients: Sequence[Any]) -> None:
    """Checks that gradients were not reduced by a tape.

    Raises:
        ArgumentError: gradients would be reduced twice.
    """
    if any(getattr(gradient, REDUCED, False) for gradient in gradients):
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                "gradients of this rank alone, which this optimizer reduces",
                "those of a DistributedGradientTape, which has reduced them",
                "Use the tape with a plain optimizer, or a plain tape with this one.",
            )
        )


def sum_over_ranks(process_set: ProcessSet | None, tensor: Any, name: str) -> Any:
    """Adds a differentiable sum over ranks to a training step.

    Collective: the ranks of the set, in the same order relative to other reductions.

    Args:
        process_set: the ranks; `None` for all.
        tensor: the framework's tensor, not a scalar, of the same shape on each rank.
        name: the name of the tensor, for messages.
    """
    return _over_ranks(process_set, tensor, _engine.ReduceOp.SUM, name)


def _over_ranks(process_set: ProcessSet | None, tensor: Any, op: Any, name: str) -> Any:
    def reduce(array: np.ndarray) -> np.ndarray:
        comm = runtime.communicator(process_set)
        options = _engine.OpOptions(op)
        return _engine.collectives.allreduce(comm, [array], [name], options, bucket_nbytes(comm))[0]

    return _backends.active().differentiable_host_callback(tensor, reduce, reduce)


def _check_as_many(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    if len(gradients) != len(variables):
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                f"a gradient, or None, for each of {len(variables)} variables",
                f"{len(gradients)} gradients",
                "Pass the variables that the gradients are of, in the same order.",
            )
        )


def _name(variable: Any) -> str:
    return f"the gradient of {variable_name(variable)}"
