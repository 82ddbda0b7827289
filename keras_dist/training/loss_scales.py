"""What a `LossScaleOptimizer` needs before its first step, whoever calls it.

It decides from the gradients of its own rank whether to hand them on. Where it is made around a
distributed optimizer, the reduction would be missing on a rank that skips a step, and the others
would add gradients of another step to theirs. `trainer` sees those that models have before their
step is built; those of a loop by hand are seen here.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.training.distributed import move_outwards

__all__ = ["watch_loss_scales"]


@functools.cache
def watch_loss_scales() -> None:
    """Makes every `LossScaleOptimizer` of this process take a reduction from inside first."""
    scaled: Any = keras.optimizers.LossScaleOptimizer
    scaled.apply = _outside(scaled.apply)
    scaled.stateless_apply = _outside(scaled.stateless_apply)


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that makes steps, before which the reduction is moved outwards."""

    @functools.wraps(method)
    def outside(self: Any, *args: Any, **kwargs: Any) -> Any:
        if move_outwards(self):  # its class, so also its method, is another one now
            return getattr(self, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return outside
