"""Optimizers for large batches that Keras lacks. Knows no ranks: `DistributedOptimizer` does.

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
    """Layer-wise adaptive rate scaling: SGD with momentum and a rate for each variable.

    The steps of a variable `w` with gradient `g` are

    ```
    ratio    = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)
    momentum = momentum_factor * momentum - learning_rate * ratio * (g + weight_decay * w)
    w        = w + momentum
    ```

    with the norms of the whole variable; `ratio` is 1 where a norm is 0. Weight decay is part of
    the gradient, as in the paper, and not taken off the weights apart from it as in AdamW.

    Args:
        learning_rate: a float, a schedule, or a callable without arguments. Defaults to 0.01.
        momentum: the momentum's factor, from 0 to less than 1. Defaults to 0.9.
        weight_decay: the factor of the weights that is added to the gradient; at least 0, `None`
            means 0. Defaults to 0. Besides `exclude_from_layer_adaptation`, variables can be
            left out of it by `exclude_from_weight_decay`, as with any optimizer of Keras.
        trust_coefficient: the part of a variable's norm by which a step may change it at a
            learning rate of 1; positive. Defaults to 0.001.
        epsilon: what keeps the quotient finite; at least 0. Defaults to 1e-9.
        exclude_from_layer_adaptation: parts of the names of variables, such as `"bias"`, that
            make steps of plain SGD with momentum, without weight decay. It is a variable's own
            name that counts, not that of its layer. Defaults to biases and the variables of
            normalisation layers.
        **kwargs: clipping, EMA, accumulation and the name, as for any optimizer of Keras.

    Raises:
        ArgumentError: a number is out of its range.

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
        """Makes the momentum of each variable, and decides which ones are adapted and decay."""
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
        """Makes the step of one variable."""
        index = variable_index(self, variable)
        dtype = variable.dtype
        rate = ops.cast(learning_rate, dtype)
        value = ops.convert_to_tensor(variable)
        # The norm is that of the dense gradient: rows of an embedding may occur several times,
        # and the sum with something dense adds them up.
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
        of_value, of_gradient = _norm(value), _norm(gradient)
        ratio = self.trust_coefficient * of_value
        ratio = ratio / (of_gradient + decay * of_value + self.epsilon)
        return ops.where(ops.logical_and(of_value > 0, of_gradient > 0), ratio, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Returns what `from_config` makes the same optimizer of."""
        return super().get_config() | {
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "exclude_from_layer_adaptation": self.exclude_from_layer_adaptation,
        }


def _norm(tensor: Any) -> Any:
    # In float16 the squares of a few hundred would be infinite.
    return ops.sqrt(ops.sum(ops.square(ops.cast(tensor, "float32"))))


def _check(expected: str, received: Any, holds: bool) -> None:
    if not holds:
        where = "[keras_dist.optimizers.LARS]"
        raise errors.ArgumentError(
            errors.explain(where, expected, repr(received), "Pass such a value or leave it out.")
        )
