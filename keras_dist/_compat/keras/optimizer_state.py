"""Names of Keras: the state of an optimizer."""

from typing import Any

from keras_dist._compat.contract import Owner


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer is built for."""
    return list(optimizer._trainable_variables)


def accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which a built optimizer accumulates gradients, possibly none."""
    created = vars(optimizer).get("_accumulated_gradients") or []
    return [variable for variable in created if variable is not None]


def slots(optimizer: Any, count: int) -> list[list[Any]]:
    """Returns the lists of an optimizer that hold a variable for each of `count` trained ones."""
    lists = [value for name, value in vars(optimizer).items() if name != "_variables"]
    return [value for value in lists if isinstance(value, list) and len(value) == count]


def batches_seen(optimizer: Any) -> Any:
    """Returns the variable that counts batches; `iterations` counts updates."""
    return optimizer._iterations


def learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of an optimizer: a schedule, a function or a variable."""
    return optimizer._learning_rate


def velocities(optimizer: Any) -> list[Any]:
    """Returns the velocities of an optimizer, such as SGD with momentum; possibly none."""
    return list(vars(optimizer).get("momentums") or ())


def variable_index(optimizer: Any, variable: Any) -> int:
    """Returns the index of a variable among those that an optimizer trains."""
    index: int = optimizer._get_variable_index(variable)
    return index


def has_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Returns whether weight decay applies to a variable, see `exclude_from_weight_decay`."""
    return bool(optimizer._use_weight_decay(variable))


def is_overwritten(variable: Any) -> bool:
    """Returns whether Keras assigns its gradient to a variable, as for float8."""
    # Other variables, some of which are not Keras', lack the attribute.
    return bool(getattr(variable, "overwrite_with_gradient", False))


def is_embedding(variable: Any) -> bool:
    """Returns whether a variable is the table of a `keras.layers.Embedding`, by its name."""
    return getattr(variable, "name", None) == "embeddings" and len(variable.shape) == 2


class DecayHook:
    """A mixin in front of an optimizer's class whose update includes the weight decay."""

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing: the decay is part of the step."""


OPTIMIZER = Owner("keras:optimizers.Optimizer")
STATE = "state of the optimizer would be missing in broadcasts and checks"

CONTRACT = (
    OPTIMIZER.attribute(
        "_trainable_variables", "to find the variables that an optimizer is built for", STATE
    ),
    OPTIMIZER.attribute(
        "_accumulated_gradients",
        "to exclude accumulated gradients, which differ between ranks, from broadcasts",
        "they would be broadcast and verified",
    ),
    OPTIMIZER.attribute(
        "_variables", "to tell the list of all variables of an optimizer from its slots", STATE
    ),
    OPTIMIZER.attribute(
        "_iterations", "to count batches under gradient accumulation", "batches would be miscounted"
    ),
    OPTIMIZER.attribute(
        "_learning_rate",
        "to find the schedule of an optimizer",
        "a schedule and a callback would both set the learning rate",
    ),
    Owner("keras:optimizers.SGD").attribute(
        "momentums",
        "to scale velocities when the learning rate changes",
        "velocities would not be scaled",
    ),
    OPTIMIZER.method(
        "_get_variable_index(variable)",
        "to find the momentum of a variable in LARS",
        "LARS could not make a step",
    ),
    OPTIMIZER.method(
        "_use_weight_decay(variable)",
        "to respect exclude_from_weight_decay in LARS",
        "LARS could not be built",
    ),
    OPTIMIZER.method(
        "_apply_weight_decay(variables)",
        "to apply the weight decay as part of the step of LARS",
        "the decay would be applied twice",
    ),
)
