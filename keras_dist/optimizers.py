"""Optimizers for large batches. `DistributedOptimizer` makes them reduce over the ranks.

```python
optimizer = keras_dist.optimizers.LARS(0.1 * keras_dist.size(), weight_decay=1e-4)
model.compile(keras_dist.DistributedOptimizer(optimizer), loss="mse")
```
"""

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from keras_dist import errors
from keras_dist._compat.keras.optimizer_state import DecayHook, has_weight_decay, variable_index

__all__ = ["LARS"]


@keras.saving.register_keras_serializable(package="keras_dist")
class LARS(DecayHook, keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling: SGD with momentum and a learning rate per variable.

    The update of a variable `w` with gradient `g` is

    ```
    ratio    = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)
    momentum = momentum_factor * momentum - learning_rate * ratio * (g + weight_decay * w)
    w        = w + momentum
    ```

    where `|.|` is the L2 norm of the whole variable; `ratio` is 1 if a norm is 0. Weight decay is
    part of the gradient, as in the paper, not decoupled as in AdamW.

    Args:
        learning_rate: a float, a `LearningRateSchedule`, or a callable without arguments.
            Defaults to 0.01.
        momentum: the momentum factor, in [0, 1). Defaults to 0.9.
        weight_decay: factor of the weights that are added to the gradient, at least 0; `None`
            means 0. Defaults to 0. `exclude_from_weight_decay` excludes further variables, as in
            any Keras optimizer.
        trust_coefficient: relative change of the norm of a variable by a step with a learning rate
            of 1; positive. Defaults to 0.001.
        epsilon: constant for numerical stability, at least 0. Defaults to 1e-9.
        exclude_from_layer_adaptation: substrings of names, such as `"bias"`, of variables that
            are updated by plain SGD with momentum, without weight decay. Compared with the name
            of the variable, not of its layer. Defaults to biases and the variables of
            normalization layers.
        **kwargs: arguments of any Keras optimizer: clipping, EMA, gradient accumulation, name.

    Raises:
        ArgumentError: a number is out of range.

    Example:
    ```python
    optimizer = keras_dist.optimizers.LARS(2.0, weight_decay=1e-4)
    ```

    Reference:
        You, Gitman, Ginsburg 2017, Large Batch Training of Convolutional Networks,
        https://arxiv.org/abs/1708.03888
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        weight_decay: float | None = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 1e-9,
        exclude_from_layer_adaptation: Iterable[str] = ("bias", "gamma", "beta"),
        **kwargs: Any,
    ):
        weight_decay = weight_decay or 0.0
        _check("momentum to be at least 0 and less than 1", momentum, 0 <= momentum < 1)
        _check("weight_decay to be at least 0", weight_decay, weight_decay >= 0)
        _check("trust_coefficient to be positive", trust_coefficient, trust_coefficient > 0)
        _check("epsilon to be at least 0", epsilon, epsilon >= 0)
        names = exclude_from_layer_adaptation
        _check("exclude_from_layer_adaptation to be a list of names", names, type(names) is not str)
        super().__init__(learning_rate, weight_decay=weight_decay, **kwargs)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.exclude_from_layer_adaptation = list(names)

    def build(self, variables: list[Any]) -> None:
        """Creates the momentum of each variable; selects the variables that adapt and decay."""
        if self.built:
            return
        super().build(variables)
        self.momentums = [
            self.add_variable_from_reference(variable, name="momentum") for variable in variables
        ]
        self._adapts = [
            not any(part in variable.name for part in self.exclude_from_layer_adaptation)
            for variable in variables
        ]
        self._decays = [
            adapts and has_weight_decay(self, variable)
            for adapts, variable in zip(self._adapts, variables, strict=True)
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable."""
        index = variable_index(self, variable)
        dtype = variable.dtype
        rate = ops.cast(learning_rate, dtype)
        value = ops.convert_to_tensor(variable)
        # Adding a dense tensor sums repeated rows of an embedding's gradient before the norm.
        gradient = ops.add(ops.zeros_like(value), ops.cast(gradient, dtype))
        decay = self.weight_decay if self._decays[index] else 0.0
        if self._adapts[index]:
            rate = ops.multiply(rate, ops.cast(self._ratio(value, gradient, decay), dtype))
        if decay:
            gradient = ops.add(gradient, ops.multiply(value, ops.cast(decay, dtype)))
        momentum = self.momentums[index]
        change = ops.subtract(
            ops.multiply(momentum, ops.cast(self.momentum, dtype)), ops.multiply(gradient, rate)
        )
        self.assign(momentum, change)
        self.assign_add(variable, change)

    def _ratio(self, value: Any, gradient: Any, decay: float) -> Any:
        value_norm, gradient_norm = _norm(value), _norm(gradient)
        ratio = self.trust_coefficient * value_norm
        ratio = ratio / (gradient_norm + decay * value_norm + self.epsilon)
        return ops.where(ops.logical_and(value_norm > 0, gradient_norm > 0), ratio, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the optimizer, as for `from_config`."""
        return super().get_config() | {
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "exclude_from_layer_adaptation": self.exclude_from_layer_adaptation,
        }


def _norm(tensor: Any) -> Any:
    # In float16 the square of 256 overflows.
    return ops.sqrt(ops.sum(ops.square(ops.cast(tensor, "float32"))))


def _check(expected: str, received: Any, holds: bool) -> None:
    if not holds:
        where = "[keras_dist.optimizers.LARS]"
        raise errors.ArgumentError(
            where, expected, repr(received), "Pass a value in this range, or omit the argument."
        )
