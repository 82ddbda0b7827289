"""Checks on the updates of an optimizer: gradients are reduced, variables are independent.

The reduction overrides an undocumented Keras method, which another version may rename. `Update`
and `check_reduced` hook different methods: those that receive gradients, and the method that
updates variables. In a graph they run at tracing time and cost nothing per step.
"""

from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.training.model_state import optimizers_inside

# Attribute of an optimizer: an update is in progress.
ENTERED = "_keras_dist_entered"


class Update:
    """Context of one update; checks at its end that gradients were reduced.

    Nested calls of the same optimizer belong to the outermost update.
    """

    def __init__(self, optimizer: Any, has_gradients: bool):
        self._optimizer = optimizer
        self.is_outermost = not optimizer.__dict__.get(ENTERED, False)
        self._must_reduce = self.is_outermost and has_gradients and optimizer._reduces()

    def __enter__(self) -> "Update":
        if self.is_outermost:
            self._mark(True)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self.is_outermost:
            return
        try:
            if kind is None and self._must_reduce:
                check_reduced(self._optimizer)
        finally:
            self._mark(False)

    def _mark(self, entered: bool) -> None:
        self._optimizer.__dict__[ENTERED] = entered
        self._optimizer._keras_dist.has_reduced = False


def check_reduced(optimizer: Any) -> None:
    """Checks that the gradients of the current update have been reduced."""
    reduction = optimizer._keras_dist
    if reduction.has_reduced or reduction.communicator() is None:
        return
    versions = f"Keras {keras.__version__} on {keras.backend.backend()}"
    raise errors.BackendError(
        runtime.where(),
        "each update to use the reduced gradients of all ranks",
        f"an update of {optimizer.name!r} by the gradients of this rank alone, with {versions}",
        "End the job: the weights of the ranks differ. Use a version of Keras that keras_dist "
        "supports.",
    )


def check_independent(optimizer: Any) -> None:
    """Checks that an optimizer updates each variable by the gradient of that variable alone."""
    every = [optimizer, *optimizers_inside(optimizer)]
    is_scaled = any(
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer) for optimizer in every
    )
    if is_scaled or any(optimizer.global_clipnorm for optimizer in every):
        raise errors.ArgumentError(
            runtime.where(),
            "an optimizer that updates each variable independently, for local variables",
            "a LossScaleOptimizer" if is_scaled else "an optimizer with global_clipnorm",
            "Use clipnorm instead of global_clipnorm, bfloat16 instead of float16.",
        )
