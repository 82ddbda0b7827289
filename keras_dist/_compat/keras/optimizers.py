"""Names of Keras: the methods by which an optimizer updates variables."""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist._compat.contract import Owner
from keras_dist._compat.keras.optimizer_state import accumulators
from keras_dist._compat.keras.versions import release, uses

# Gradients enter an optimizer through these methods.
APPLY_METHODS = ("apply", "apply_gradients", "stateless_apply", "_backend_apply_gradients")
# On TensorFlow: the method that updates variables under a strategy.
TF_UPDATE = "_distributed_tf_update_step"
# Attribute of an optimizer: the strategy of tf.distribute in whose scope it was made.
TF_STRATEGY = "_distribution_strategy"
# Of Keras 3.15 and later.
MULTI_OPTIMIZER: Any = vars(keras.optimizers).get("MultiOptimizer", ())


class UpdateHook:
    """A mixin in front of an optimizer's class that takes part in each update.

    Subclasses define `_keras_dist_before_update()`, called before variables are updated.
    """

    _keras_dist_before_update: Callable[[], None]

    def _backend_update_step(self, grads: Any, trainable_variables: Any, *rest: Any) -> Any:
        self._keras_dist_before_update()
        return super()._backend_update_step(grads, trainable_variables, *rest)  # type: ignore[misc]

    def _backend_reset_gradient_accumulators(self) -> None:
        # On torch Keras multiplies them by 0, which keeps the NaN of an overflow.
        for accumulator in accumulators(self):
            accumulator.assign(keras.ops.zeros(accumulator.shape, accumulator.dtype))


class ClippingHook:
    """A mixin in front of an optimizer's class that changes gradients between passes and clipping.

    Subclasses define `_keras_dist_before_passes(gradients, variables)`, called before gradients
    are accumulated, and `_keras_dist_before_clipping(gradients)`, which returns the gradients to
    clip and apply.
    """

    _keras_dist_before_passes: Callable[[Any, Any], None]
    _keras_dist_before_clipping: Callable[[Any], Any]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        self._keras_dist_before_passes(grads, trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._keras_dist_before_clipping(grads))  # type: ignore[misc]


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside a `LossScaleOptimizer`, or a wrapper like it; else `None`."""
    return getattr(optimizer, "inner_optimizer", None)


def innermost_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that updates variables: the innermost of wrappers, or itself."""
    inner = inner_optimizer(optimizer)
    return optimizer if inner is None else innermost_optimizer(inner)


def stateless_step(
    optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
) -> Any:
    """Returns the state after a step of a `LossScaleOptimizer` whose gradients are finite."""
    given = optimizer_variables, grads, trainable_variables
    return optimizer._stateless_handle_finite_grads(*given)


def stateless_skip(optimizer: Any, optimizer_variables: Any, trainable_variables: Any) -> Any:
    """Returns the state after a step that a `LossScaleOptimizer` skips."""
    return optimizer._stateless_handle_non_finite_grads(optimizer_variables, trainable_variables)


def make_unpickler(cls: Any) -> Any:
    """Returns the function that unpickles objects of a class."""
    return cls._unpickle_model


OPTIMIZER = Owner("keras:optimizers.Optimizer")
LOSS_SCALE = Owner("keras:optimizers.LossScaleOptimizer")
NOT_REDUCED = "each rank would train by its own gradients"

CONTRACT = (
    OPTIMIZER.method(
        "_clip_gradients(grads)", "to reduce gradients before they are clipped", NOT_REDUCED
    ),
    OPTIMIZER.method(
        "_backend_apply_gradients(grads, trainable_variables)",
        "to find the variables of the gradients",
        NOT_REDUCED,
    ),
    OPTIMIZER.method(
        "_backend_update_step(grads, trainable_variables, learning_rate)",
        "to check that the gradients of an update are reduced",
        "an update by the gradients of one rank might go unnoticed",
    ),
    OPTIMIZER.method(
        "_backend_reset_gradient_accumulators()",
        "to clear accumulated gradients that have overflowed",
        "NaN would remain in them on torch",
    ),
    *(
        OPTIMIZER.method(
            method,
            f"to reduce the gradients of an optimizer that overrides {method.partition('(')[0]}",
            NOT_REDUCED,
        )
        for method in (
            "apply(grads, trainable_variables)",
            "apply_gradients(grads_and_vars)",
            "stateless_apply(optimizer_variables, grads, trainable_variables)",
        )
    ),
    OPTIMIZER.attribute(
        "gradient_accumulation_steps",
        "for backward_passes_per_step",
        "gradients would be reduced in each pass",
    ),
    OPTIMIZER.method(
        "_unpickle_model(bytesio)",
        "to pickle and copy a distributed optimizer",
        "a copy would not be distributed",
    ),
    OPTIMIZER.method(
        f"{TF_UPDATE}(distribution, grads_and_vars, learning_rate)",
        "to compile the update of variables for XLA",
        "training with jit_compile would fail",
        applies=lambda: uses("tensorflow"),
    ),
    OPTIMIZER.attribute(
        TF_STRATEGY,
        "to refuse an optimizer that a strategy of tf.distribute updates",
        "training would end with an error that does not name the strategy",
        applies=lambda: uses("tensorflow"),
    ),
    LOSS_SCALE.attribute(
        "inner_optimizer",
        "to find the optimizer that applies the gradients",
        "ranks would skip different steps",
    ),
    LOSS_SCALE.method(
        "check_finite(grads)",
        "to make all ranks skip the same steps",
        "ranks would skip different steps",
    ),
    LOSS_SCALE.method(
        "_stateless_handle_finite_grads(optimizer_variables, grads, trainable_variables)",
        "to make a step outside a branch",
        "a step of JAX could not be reduced",
    ),
    LOSS_SCALE.method(
        "_stateless_handle_non_finite_grads(optimizer_variables, trainable_variables)",
        "to skip a step outside a branch",
        "a step of JAX could not be reduced",
    ),
    Owner("keras:optimizers").name(
        "MultiOptimizer",
        "to reduce the gradients of all its optimizers",
        NOT_REDUCED,
        applies=lambda: release() >= (3, 15),
    ),
)
