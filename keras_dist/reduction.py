"""How an optimizer comes to reduce its gradients: a mixin over the user's own class.

The optimizer keeps its class, its name and its state: a subclass of its own class, with the
same name and module, is put in place on the instance. So `isinstance` holds, state that was
built stays, and a model saved with it loads in a process that has no keras_dist.

The reduction comes after Keras' local gradient accumulation and before clipping, so that a
clipping norm is taken of the averaged gradient.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import keras
import numpy as np

from keras_dist import _backends, _engine, runtime
from keras_dist.process_sets import ProcessSet
from keras_dist.replicas import SAME_MODEL, variable_name

__all__ = ["GradientReduction", "attach", "is_distributed", "move_outwards"]

# The last gradients of a model are ready first: reducing begins before the rest has come.
FIRST_NBYTES = 2**20


def is_distributed(optimizer: Any) -> TypeGuard["_Distributed"]:
    """Tells whether an optimizer reduces its gradients over the ranks."""
    return isinstance(optimizer, _Distributed)


def move_outwards(optimizer: Any) -> None:
    """Moves the reduction from the optimizer inside a `LossScaleOptimizer` to the outside.

    `compile` puts such a wrapper around the user's optimizer under `mixed_float16`. It looks
    at the gradients and, when one overflows, skips the step; left inside, the reduction
    would then be missing on that rank alone. Does nothing for other optimizers.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_distributed(inner) and not is_distributed(optimizer):
        reduction = inner._keras_dist
        inner.__class__ = type(inner).__bases__[1]
        object.__delattr__(inner, "_keras_dist")
        attach(optimizer, reduction)


def attach(optimizer: Any, reduction: "GradientReduction") -> None:
    """Makes an optimizer reduce its gradients by `reduction`; changes its class in place."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    mixin = _LossScaled if scaled else _Distributed
    object.__setattr__(optimizer, "_keras_dist", reduction)
    optimizer.__class__ = _distributed_class(optimizer.__class__, mixin)


@functools.cache
def _distributed_class(base: Any, mixin: Any) -> type:
    return type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__},
    )


class GradientReduction:
    """The reduction of one optimizer's gradients; holds the plans it has made.

    Args:
        op: `ReduceOp.AVERAGE` or `ReduceOp.SUM`.
        lend: whether gradients may lie in memory that all ranks share, for an optimizer
            that reads them and does not keep them. TensorFlow's `assign` takes the memory
            of what it is given, so an optimizer that stores a gradient would store that.
        process_set: the ranks that reduce among themselves; `None` for all.
        compression: what gradients look like between nodes.
    """

    def __init__(
        self,
        op: _engine.ReduceOp,
        lend: bool,
        process_set: ProcessSet | None = None,
        compression: _engine.Compressor = _engine.Compression.none,
    ):
        self.op = op
        self.lend = lend
        self.process_set = process_set
        self.compression = compression
        self.variables: Sequence[Any] = ()
        self._plans: dict[Any, _engine.FusedAllreduce] = {}

    def communicator(self) -> _engine.Communicator | None:
        """Returns that of the ranks with whom this one reduces; `None` when there are none.

        Raises:
            ArgumentError: the process set has no id any more.
        """
        if not runtime.includes_me(self.process_set):
            return None
        comm = runtime.communicator(self.process_set)
        return comm if comm.size > 1 else None

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], when: Any = None
    ) -> list[Any]:
        """Reduces gradients, one for each variable; `None` stays `None`.

        Args:
            gradients: this rank's gradients.
            variables: the variables that they are of.
            when: see `Backend.reduce_gradients`.
        """
        comm = self.communicator()
        if comm is None:
            return _backends.active().add_up_rows(gradients)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        reduced = _backends.active().reduce_gradients(
            [gradients[index] for index in present],
            [f"the gradient of {variable_name(variables[index])}" for index in present],
            [tuple(variables[index].shape) for index in present],
            functools.partial(self._plan, comm),
            functools.partial(self._reduce_slices, comm),
            when,
        )
        result = list(gradients)
        for index, gradient in zip(present, reduced, strict=True):
            result[index] = gradient
        return result

    def _plan(
        self,
        comm: _engine.Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
    ) -> _engine.FusedAllreduce:
        key = (comm, tuple(names), tuple(specs))
        if key not in self._plans:
            nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
            self._plans[key] = _engine.FusedAllreduce(
                comm,
                names,
                specs,
                self.op,
                runtime.bucket_nbytes(comm, nbytes),
                first_nbytes=FIRST_NBYTES,
                operation="the reduction of gradients",
                remedy=SAME_MODEL,
                lend=self.lend,
                compression=self.compression,
            )
        return self._plans[key]

    def _reduce_slices(
        self, comm: _engine.Communicator, name: str, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return _engine.reduce_slices(comm, values, indices, self.op, name)


class _Distributed:
    """The override that makes an optimizer distributed. Comes before the user's class."""

    _keras_dist: GradientReduction

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an optimizer of the user's class, not distributed, from a configuration."""
        base: Any = cls.__bases__[1]
        return base.from_config(*args, **kwargs)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        # `_clip_gradients`, the one call between accumulation and update, is not told of
        # which variables the gradients are.
        self._keras_dist.variables = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        when = None
        if self.gradient_accumulation_steps and keras.backend.backend() == "jax":  # type: ignore[attr-defined]
            # On JAX Keras comes here in every step and drops the result of those that only
            # accumulate; elsewhere only in steps that update.
            when = (self._iterations + 1) % self.gradient_accumulation_steps == 0  # type: ignore[attr-defined]
        reduced = self._keras_dist(grads, self._keras_dist.variables, when)
        return super()._clip_gradients(reduced)  # type: ignore[misc]


class _LossScaled(_Distributed):
    """The override for a `LossScaleOptimizer`, whose own `apply` decides on skipping."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = list(trainable_variables or self._trainable_variables)  # type: ignore[attr-defined]
        reduced = self._keras_dist(grads, variables)
        return super().apply(reduced, trainable_variables)  # type: ignore[misc]

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        reduced = self._keras_dist(grads, self._trainable_variables)  # type: ignore[attr-defined]
        return super().stateless_apply(optimizer_variables, reduced, trainable_variables)  # type: ignore[misc]
