"""The state of a model: weights, optimizer variables, and state that is local to a rank."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, _engine
from keras_dist._compat.keras import models, optimizer_state
from keras_dist._compat.keras.optimizers import MULTI_OPTIMIZER, inner_optimizer
from keras_dist._compat.keras.sliced_updates import averages

# Attribute of a model: variables that are local besides those of its optimizers.
LOCAL = "_keras_dist_local"
# Attribute of a state variable that is this rank's slice of a whole value, see `sharded_state`.
SLICE = "_keras_dist_slice"


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers of a model and their inner optimizers, each once; see `families`."""
    every = [optimizer for family in families(model) for optimizer in family]
    return list({id(optimizer): optimizer for optimizer in every}.values())


def families(model: keras.Model) -> list[list[Any]]:
    """Returns, for each optimizer of a model, the optimizer followed by its inner optimizers."""
    # The compiled one comes first, then those that a custom train step has in attributes of the
    # model and in its lists and dicts.
    found: list[Any] = [models.optimizer_of(model)]
    for value in vars(model).values():
        items = value.values() if isinstance(value, dict) else value
        found.extend(items if isinstance(value, list | tuple | dict) else [value])
    outermost = {
        id(optimizer): optimizer
        for optimizer in found
        if isinstance(optimizer, keras.optimizers.Optimizer)
    }
    return [[outer, *optimizers_inside(outer)] for outer in outermost.values()]


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns the inner optimizers of an optimizer, at any depth, and those of its rounds."""
    rounds = rounds_of(optimizer)
    outer = [] if rounds is None else rounds.outers
    if isinstance(optimizer, MULTI_OPTIMIZER):
        return [*optimizer.optimizers, *outer]
    inner = inner_optimizer(optimizer)
    inside = outer if inner is None else [inner, *optimizers_inside(inner), *outer]
    return list({id(each): each for each in inside}.values())


def rounds_of(optimizer: Any) -> Any:
    """Returns the `Rounds` of an optimizer with local steps, otherwise `None`."""
    reduction = getattr(optimizer, "_keras_dist", None)
    return None if reduction is None else reduction.rounds


def state(model: keras.Model) -> list[Any]:
    """Returns the variables that must be equal on all ranks, each once."""
    variables = list(model.weights)
    for optimizer in optimizers_of(model):
        variables.extend(optimizer.variables)
    excluded = {id(variable) for variable in accumulators(optimizers_of(model))}
    return list({id(v): v for v in variables if id(v) not in excluded}.values())


def shared_state(model: keras.Model) -> list[Any]:
    """Returns the state without slices, local variables with their slots, and `state_of_steps`."""
    excluded = _with_slots(optimizers_of(model), local_variables(model))
    excluded.update(id(variable) for variable in state_of_steps(model))
    return [v for v in state(model) if id(v) not in excluded and slice_of(v) is None]


def state_of_steps(model: keras.Model) -> list[Any]:
    """Returns the state of local steps, without learning rates and averages, which are alike."""
    stepping = _stepping(model)
    found = {id(variable): variable for each in stepping for variable in each.variables}
    shared = [optimizer_state.learning_rate(each) for each in stepping]
    for each in stepping:
        shared += averages(each) if each.built and each.use_ema else []
    excluded = {id(v) for v in [*shared, *accumulators(stepping)]}
    return [variable for key, variable in found.items() if key not in excluded]


def accumulators_of_steps(model: keras.Model) -> list[Any]:
    """Returns the gradient accumulators of optimizers that make local steps."""
    return accumulators(_stepping(model))


def _stepping(model: keras.Model) -> list[Any]:
    """Returns the optimizers of a model that make local steps, and those inside of them."""
    every = [family for family in families(model) if rounds_of(family[0]) is not None]
    outer = {id(outer) for family in every for outer in rounds_of(family[0]).outers}
    members = [each for family in every for each in family if id(each) not in outer]
    return list({id(each): each for each in members}.values())


def slice_of(variable: Any) -> tuple[Any, int] | None:
    """Returns the `Shards` of a state variable and the index of its variable, if it is a slice."""
    found: tuple[Any, int] | None = getattr(variable, SLICE, None)
    return found


def replicated_variables(optimizer: Any) -> list[Any]:
    """Returns the variables and the state of an optimizer that its ranks keep equal."""
    every = [optimizer, *optimizers_inside(optimizer)]
    trained = optimizer_state.trained_by(optimizer)
    local = keras_variables(trained, optimizer._keras_dist.local_variables())
    own = _with_slots(every, local) | {id(variable) for variable in accumulators(every)}
    variables = [*trained, *optimizer.variables]
    return list({id(v): v for v in variables if id(v) not in own and not slice_of(v)}.values())


def accumulators(optimizers: Iterable[Any]) -> list[Any]:
    """Returns the gradient accumulators of optimizers, which differ from rank to rank."""
    return [
        variable for optimizer in optimizers for variable in optimizer_state.accumulators(optimizer)
    ]


def clear_errors(optimizers: Iterable[Any]) -> None:
    """Clears what a compression has not sent: it belongs to another step."""
    for optimizer in optimizers:
        if hasattr(optimizer, "_keras_dist"):
            optimizer._keras_dist.feedback.errors.clear()


def clear_accumulators(optimizers: Sequence[Any], besides: Iterable[Any] = ()) -> None:
    """Clears accumulated gradients, as `clear_errors` does."""
    clear_errors(optimizers)
    kept = {id(variable) for variable in besides}
    for accumulator in accumulators(optimizers):
        if id(accumulator) not in kept:
            accumulator.assign(keras.ops.zeros(accumulator.shape, accumulator.dtype))


def accumulated(model: keras.Model) -> list[Any]:
    """Returns the gradient accumulators that hold a part of the next update, of any rank."""
    # Without those of local variables, of local steps, and of Adasum, whose update is no average.
    local = _with_slots(optimizers_of(model), local_variables(model))
    waiting = {
        id(each): each
        for family in families(model)
        if rounds_of(family[0]) is None and not any(map(_uses_adasum, family))
        for each in family
        if int(optimizer_state.batches_seen(each)) % (each.gradient_accumulation_steps or 1)
    }
    found = accumulators(waiting.values())
    return [v for v in found if id(v) not in local and slice_of(v) is None]


def _uses_adasum(optimizer: Any) -> bool:
    reduction = getattr(optimizer, "_keras_dist", None)
    return reduction is not None and reduction.options.op is _engine.ReduceOp.ADASUM


def keep_local(model: keras.Model, variables: Iterable[Any]) -> None:
    """Makes variables of a model local, in addition to those of its optimizers."""
    object.__setattr__(model, LOCAL, variables)


def local_variables(model: keras.Model) -> list[Any]:
    """Returns the local variables of a model and of its optimizers."""
    reductions = [getattr(optimizer, "_keras_dist", None) for optimizer in optimizers_of(model)]
    own = [
        variable
        for reduction in reductions
        if reduction is not None
        for variable in reduction.local_variables()
    ]
    return keras_variables(model.variables, [*own, *model.__dict__.get(LOCAL, ())])


def random_states(model: keras.Model) -> list[Any]:
    """Returns the variables of a model's random generators, which differ from rank to rank."""
    weights = {id(weight) for weight in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def variable_name(variable: Any) -> str:
    """Returns the path of a variable, such as `dense/kernel`."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "a tensor"
    return re.sub(r":\d+$", "", str(path))


def untrained_zeros(like: Any, shape: Sequence[int], suffix: str = "") -> keras.Variable:
    """Returns a variable that no step trains, of the dtype and named after another one."""
    return keras.Variable(
        "zeros",
        shape=tuple(shape),
        dtype=keras.backend.standardize_dtype(like.dtype),
        trainable=False,
        name=f"{variable_name(like)}{suffix}".replace("/", "_"),
    )


def layer_name(layer: Any) -> str:
    """Returns the path of a layer; one that is not built has none, but a name."""
    name: str = layer.path or layer.name
    return name


def bytes_of(variable: Any) -> np.ndarray:
    """Returns the value of a variable as a flat uint8 array."""
    return np.ascontiguousarray(to_numpy(variable)).reshape(-1).view(np.uint8)


def to_numpy(variable: Any) -> np.ndarray:
    """Returns the value of a variable as a host array."""
    return np.asarray(keras.ops.convert_to_numpy(variable))


def host_array(variable: Any) -> np.ndarray:
    """Returns the value of a variable, in place or copied: to be read, before the next step."""
    return _backends.active().host_array(value_of(variable))


def value_of(variable: Any) -> Any:
    """Returns the tensor of a variable of Keras or of its backend."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def keras_variables(known: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
    """Returns variables; for one that a known Keras variable holds, that Keras variable."""
    if all(isinstance(variable, keras.Variable) for variable in variables):
        return list(variables)
    by_value = {id(v.value): v for v in known if isinstance(v, keras.Variable)}
    return [by_value.get(id(variable), variable) for variable in variables]


def _with_slots(optimizers: Iterable[Any], variables: Iterable[Any]) -> set[int]:
    """Returns the ids of variables and of their optimizer slots."""
    found = {id(variable) for variable in variables}
    for optimizer in optimizers:
        trainable = optimizer_state.trained_by(optimizer)
        indices = [index for index, variable in enumerate(trainable) if id(variable) in found]
        # Keras' optimizers keep slots in lists with one element per trainable variable.
        for slots in optimizer_state.slots(optimizer, len(trainable)) if indices else ():
            found.update(id(slots[index]) for index in indices)
    return found
