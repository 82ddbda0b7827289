"""Support for a `LossScaleOptimizer` around a distributed optimizer in custom loops.

A `LossScaleOptimizer` skips steps by the gradients of its own rank. With an inner reduction, a rank
that skips would not reduce, and the others would combine gradients of different steps. `trainer`
moves the reduction outwards for models; this module does so in custom loops.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.training.distributed import move_outwards

__all__ = ["watch_loss_scales"]


@functools.cache
def watch_loss_scales() -> None:
    """Patches `LossScaleOptimizer` to take over the reduction of its inner optimizer."""
    scaled: Any = keras.optimizers.LossScaleOptimizer
    scaled.apply = _outside(scaled.apply)
    scaled.stateless_apply = _outside(scaled.stateless_apply)


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that makes steps: the reduction is moved outwards first."""

    @functools.wraps(method)
    def outside(self: Any, *args: Any, **kwargs: Any) -> Any:
        if move_outwards(self):  # the class, and so the method, has changed
            return getattr(self, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return outside
