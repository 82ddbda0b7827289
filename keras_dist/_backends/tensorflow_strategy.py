"""Strategies of `tf.distribute`, which average gradients and share data out as keras_dist does."""

from typing import Any

import tensorflow as tf

from keras_dist import errors


def refuse_strategy(expected: str, model: Any = None) -> None:
    """Checks that no strategy is in scope, nor was when a model or its optimizer was made."""
    used = [tf.distribute.get_strategy()] if tf.distribute.has_strategy() else _used_by(model)
    if used:
        raise errors.BackendError(
            "[keras_dist]",
            expected,
            f"a tf.distribute.{type(used[0]).__name__}, so that both would act",
            "Make the model and its optimizer, and train, outside of the scope of a strategy.",
        )


def _used_by(model: Any) -> list[Any]:
    """Returns the strategies in whose scope a model and its optimizer were made."""
    if model is None:
        return []
    from keras_dist._compat.keras.optimizers import TF_STRATEGY, innermost_optimizer

    optimizer = innermost_optimizer(model.optimizer)
    return [s for s in (model.distribute_strategy, getattr(optimizer, TF_STRATEGY)) if _acts(s)]


def _acts(strategy: Any) -> bool:
    """Returns whether a strategy is another one than TensorFlow's default."""
    with strategy.scope():
        return tf.distribute.has_strategy()
