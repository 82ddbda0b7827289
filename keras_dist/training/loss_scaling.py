"""Moves a reduction from the optimizer inside a `LossScaleOptimizer` to the outside.

A `LossScaleOptimizer` skips a step when a gradient of its own rank overflows. If the inner
optimizer reduced, a rank that skips would not reduce, and the other ranks would combine gradients
of different steps. `trainer` moves the reduction for models, `watch_loss_scales` for custom loops.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import runtime
from keras_dist._compat.keras.optimizers import inner_optimizer
from keras_dist.training.copied_options import KeepsOptions, base_of, derived
from keras_dist.training.copies import complete
from keras_dist.training.distributed import attach, is_distributed
from keras_dist.training.sharding_checks import check_unscaled
from keras_dist.training.update_check import check_independent


def move_outwards(optimizer: Any) -> bool:
    """Moves the reduction from an inner optimizer to the `LossScaleOptimizer` around it.

    Under `mixed_float16`, `compile` wraps the user's optimizer. Other optimizers are unchanged.
    """
    inner = inner_optimizer(optimizer)
    complete(inner)
    if not isinstance(inner, KeepsOptions) or is_distributed(optimizer):
        return False
    reduction = inner._keras_dist
    if reduction.options.shard_state:
        check_unscaled(optimizer, runtime.where())
    if reduction.local_variables():
        check_independent(optimizer)
    # Keras copies the inner optimizer, which was passed to `compile`.
    inner.__class__ = derived(base_of(type(inner)), KeepsOptions)
    attach(optimizer, reduction)
    return True


@functools.cache
def watch_loss_scales() -> None:
    """Patches `LossScaleOptimizer` to move the reduction of its inner optimizer outwards."""
    patched: Any = keras.optimizers.LossScaleOptimizer
    patched.apply = _moving_outwards(patched.apply)
    patched.stateless_apply = _moving_outwards(patched.stateless_apply)


def _moving_outwards(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if move_outwards(self):  # the class has changed, and with it the method
            return getattr(self, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return wrapper
