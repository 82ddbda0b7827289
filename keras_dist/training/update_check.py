"""Check that the gradients of each update have been reduced.

The reduction overrides an undocumented Keras method, which another version may rename. The check
overrides different methods: those that receive gradients, and the one that updates variables. In a
graph the check runs at tracing time and costs nothing per step.
"""

from typing import Any

import keras

from keras_dist import errors, runtime

__all__ = ["Update", "check_reduced"]

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
    """Checks that the gradients of the current update have been reduced.

    Raises:
        BackendError: gradients were not reduced, on more than one rank.
    """
    reduction = optimizer._keras_dist
    if reduction.has_reduced or reduction.communicator() is None:
        return
    versions = f"Keras {keras.__version__} on {keras.backend.backend()}"
    raise errors.BackendError(
        errors.explain(
            runtime.where(),
            "each update to come by the gradients of all ranks",
            f"one of {optimizer.name!r} by those of this rank alone, with {versions}",
            "End the job, for the weights of the ranks differ; use a version of Keras that "
            "keras_dist has been tested with.",
        )
    )
