"""Names of Keras: the methods by which an optimizer finds and changes the state of a variable."""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist._compat.contract import Owner
from keras_dist._compat.keras.optimizers import APPLY_METHODS

# Keras' optimizers that update each element by itself: state and update of a slice are the slice
# of the state and of the update. Not Ftrl: the last bits of its powers depend on the position of an
# element in an array, which decides whether a loop over vectors computes it.
ELEMENTWISE = (
    "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Lion"  # in the order of Keras
).split()
# Methods that decide how an optimizer updates a variable.
UPDATING = (
    *APPLY_METHODS,
    "build",
    "add_variable_from_reference",
    "update_step",
    "_backend_update_step",
    "_parallel_update_step",  # on torch
)


class SliceHook:
    """A mixin in front of an optimizer's class that updates slices instead of variables.

    Subclasses define `_keras_dist_slices(gradients, variables)`, which returns the slices of
    gradients and of variables to update, or `None` to update whole variables;
    `_keras_dist_join()`, which writes updated slices into whole variables;
    `_keras_dist_index(key)`, which returns the index of the variable of a slice, by the key of
    the slice, or `None`; `_keras_dist_current(variables)`, which returns slices with the values
    of whole variables; and `_keras_dist_whole_averages()`, which returns the moving averages of
    whole variables.
    """

    _trainable_variables: Any
    _keras_dist_slices: Callable[[Any, Any], Any]
    _keras_dist_join: Callable[[], None]
    _keras_dist_index: Callable[[Any], int | None]
    _keras_dist_current: Callable[[Any], Any]
    _keras_dist_whole_averages: Callable[[], Any]

    def _backend_update_step(self, grads: Any, trainable_variables: Any, *rest: Any) -> Any:
        pairs = self._keras_dist_slices(grads, trainable_variables)
        if pairs is None:
            return super()._backend_update_step(grads, trainable_variables, *rest)  # type: ignore[misc]
        super()._apply_weight_decay(pairs[1])  # type: ignore[misc]
        super()._backend_update_step(*pairs, *rest)  # type: ignore[misc]
        return self._keras_dist_join()

    def _apply_weight_decay(self, variables: Any) -> Any:
        """Applies the decay to whole variables; that of slices is part of their update."""
        if self._keras_dist_current(()) is None:
            super()._apply_weight_decay(variables)  # type: ignore[misc]

    def _get_variable_index(self, variable: Any) -> Any:
        index = self._keras_dist_index(self._var_key(variable))  # type: ignore[attr-defined]
        return super()._get_variable_index(variable) if index is None else index  # type: ignore[misc]

    def _use_weight_decay(self, variable: Any) -> Any:
        index = self._keras_dist_index(self._var_key(variable))  # type: ignore[attr-defined]
        if index is not None:
            whole = self._trainable_variables[index]
            # On TensorFlow Keras passes the framework's variable, whose name is longer.
            variable = whole if isinstance(variable, keras.Variable) else whole.value
        return super()._use_weight_decay(variable)  # type: ignore[misc]

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> Any:
        current = self._keras_dist_current(trainable_variables)
        of = trainable_variables if current is None else current
        super()._update_model_variables_moving_average(of)  # type: ignore[misc]

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> Any:
        averages = self._keras_dist_whole_averages()
        if averages is None:
            return super()._overwrite_model_variables_with_average_value(trainable_variables)  # type: ignore[misc]
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:
                variable.assign(average)
        return None


def updates_elementwise(optimizer: Any) -> bool:
    """Returns whether an optimizer updates each element of a variable by itself."""
    # Only optimizers of Keras are known to do so; a class of the user may, if it does not override
    # how a variable is updated.
    known = [
        vars(keras.optimizers)[name] for name in ELEMENTWISE if hasattr(keras.optimizers, name)
    ]
    mro = type(optimizer).__mro__
    return isinstance(optimizer, tuple(known)) and all(
        cls.__module__.split(".")[0] == "keras"
        for cls in mro
        if any(name in vars(cls) for name in UPDATING)
    )


def averages(optimizer: Any) -> list[Any]:
    """Returns the moving averages of an optimizer with `use_ema`, one for each variable."""
    return list(optimizer._model_variables_moving_average)


def key_of(optimizer: Any, variable: Any) -> Any:
    """Returns the key by which an optimizer knows a variable."""
    return optimizer._var_key(variable)


def replace_state(optimizer: Any, replaced: dict[int, Any]) -> None:
    """Replaces state variables of a built optimizer."""
    for value in vars(optimizer).values():
        if isinstance(value, list):
            for index, variable in enumerate(value):
                if id(variable) in replaced:
                    value[index] = replaced[id(variable)]


OPTIMIZER = Owner("keras:optimizers.Optimizer")
WHOLE = "slices of variables could not be updated"

CONTRACT = (
    OPTIMIZER.method("_var_key(variable)", "to know the slices of variables", WHOLE),
    OPTIMIZER.method(
        "_update_model_variables_moving_average(trainable_variables)",
        "to average slices of variables",
        WHOLE,
    ),
    OPTIMIZER.method(
        "_overwrite_model_variables_with_average_value(trainable_variables)",
        "to gather averages of slices",
        WHOLE,
    ),
    OPTIMIZER.attribute("_model_variables_moving_average", "to find the averages of slices", WHOLE),
)
