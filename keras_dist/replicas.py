"""The replicas of a model: which of its state must be equal on all ranks, and making it so.

State is the weights and the optimizer's variables. The states of random generators are not
part of it: they differ from rank to rank on purpose, or every rank would drop the same
units of a dropout layer.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime

__all__ = [
    "MULTI_OPTIMIZER",
    "accumulators",
    "average_statistics",
    "broadcast_state",
    "broadcast_variables",
    "bytes_of",
    "keep_local",
    "local_variables",
    "optimizers_inside",
    "optimizers_of",
    "random_states",
    "separate_seeds",
    "state",
    "trained_by",
    "variable_name",
    "verify_once",
    "verify_replicas",
]

# Of Keras 3.15 and later.
MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())
# On a model: at which moment its replicas have been found equal.
VERIFIED = "_keras_dist_verified"
# And which variables each rank keeps for itself, whatever its optimizers do.
LOCAL = "_keras_dist_local"
SAME_MODEL = "Build the same model, with the same optimizer, on every rank."


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers of a model, each once, and those inside them.

    The one it was compiled with comes first. A custom train step may use others: attributes of
    the model, or in its lists and dicts.
    """
    found: list[Any] = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        items = value.values() if isinstance(value, dict) else value
        found.extend(items if isinstance(value, list | tuple | dict) else [value])
    ours = [one for one in found if isinstance(one, keras.optimizers.Optimizer)]
    every = [one for outer in ours for one in (outer, *optimizers_inside(outer))]
    return list({id(one): one for one in every}.values())


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns the optimizers to which this one hands gradients on, as far as they are known."""
    if isinstance(optimizer, MULTI_OPTIMIZER):
        return list(optimizer.optimizers)
    inner = getattr(optimizer, "inner_optimizer", None)
    return [] if inner is None else [inner, *optimizers_inside(inner)]


def state(model: keras.Model) -> list[Any]:
    """Returns the variables that must be equal on all ranks, each once.

    Args:
        model: a Keras model; the variables of an optimizer count when it has been built.

    Returns:
        List of Keras variables, in the same order on every rank.
    """
    variables = list(model.weights)
    for optimizer in optimizers_of(model):
        variables.extend(optimizer.variables)
    own = {id(variable) for variable in accumulators(optimizers_of(model))}
    return list({id(v): v for v in variables if id(v) not in own}.values())


def trained_by(optimizer: Any) -> list[Any]:
    """Returns what the ranks of a distributed optimizer share: its state, and what it trains.

    Variables that each rank keeps for itself are not among it, nor what it has gathered of its
    own gradients.
    """
    every = [optimizer, *optimizers_inside(optimizer)]
    local = optimizer._keras_dist.local_variables()
    own = _with_slots(every, local) | {id(one) for one in accumulators(every)}
    variables = [*getattr(optimizer, "_trainable_variables", ()), *optimizer.variables]
    return list({id(v): v for v in variables if id(v) not in own}.values())


def accumulators(optimizers: Iterable[Any]) -> list[Any]:
    """Returns the variables in which a rank gathers its own gradients between two updates."""
    lists = [getattr(one, "_accumulated_gradients", None) or [] for one in optimizers]
    return [variable for found in lists for variable in found if variable is not None]


def keep_local(model: keras.Model, variables: Iterable[Any]) -> None:
    """Leaves variables of a model to each rank from now on, beside those of its optimizers."""
    object.__setattr__(model, LOCAL, variables)


def local_variables(model: keras.Model) -> list[Any]:
    """Returns the variables that the model and its optimizers leave to each rank."""
    reductions = [getattr(one, "_keras_dist", None) for one in optimizers_of(model)]
    own = [v for one in reductions if one is not None for v in one.local_variables()]
    return [*own, *model.__dict__.get(LOCAL, ())]


def broadcast_state(model: keras.Model, root_rank: int = 0) -> None:
    """Gives every rank the root's weights and optimizer state.

    Variables that are kept local, and their optimizer state, are left as they are.

    Collective: every rank; the model must be built and its architecture the same; blocks.

    Args:
        model: a built Keras model.
        root_rank: the rank whose state all receive. Defaults to 0.

    Raises:
        MismatchError: the models differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank.
    """
    model.__dict__.pop(VERIFIED, None)
    variables = _without(model, local_variables(model))
    broadcast_variables(runtime.communicator(), variables, root_rank)


def broadcast_variables(
    comm: _engine.Communicator, variables: Sequence[Any], root_rank: int
) -> None:
    """Gives some ranks the root's values of variables. Collective: those ranks; blocks.

    Args:
        comm: the ranks.
        variables: Keras variables, of the same shapes and dtypes on each.
        root_rank: the rank of the job whose values all receive.

    Raises:
        MismatchError: the variables differ; raised on every rank.
        ArgumentError: `root_rank` is not one of the ranks.
    """
    received = _engine.broadcast(
        comm,
        [_to_numpy(variable) for variable in variables],
        [variable_name(variable) for variable in variables],
        root_rank,
        operation="the broadcast of a model",
        remedy=SAME_MODEL,
    )
    if comm.job.rank != root_rank:
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)


def separate_seeds(model: keras.Model, root_rank: int = 0) -> None:
    """Gives every rank its own stream of random numbers, derived from the root's.

    The root keeps its stream, so a run on one rank is the same with and without
    keras_dist. Called again, every rank continues at the root's position.

    Collective: every rank; blocks.

    Args:
        model: a built Keras model.
        root_rank: the rank from which the seeds are derived. Defaults to 0.
    """
    comm = runtime.communicator()
    generators = random_states(model)
    received = _engine.broadcast(
        comm,
        [_to_numpy(generator) for generator in generators],
        [variable_name(generator) for generator in generators],
        root_rank,
        operation="the broadcast of a model's random seeds",
        remedy=SAME_MODEL,
    )
    if comm.rank != root_rank:
        for generator, value in zip(generators, received, strict=True):
            generator.assign(_own_seed(value, comm.rank))


def random_states(model: keras.Model) -> list[Any]:
    """Returns the variables of a model's random generators, which differ from rank to rank."""
    weights = {id(weight) for weight in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def average_statistics(model: keras.Model) -> None:
    """Makes the weights that training does not touch equal on all ranks.

    Batch normalisation keeps moving statistics of the batches it has seen, which differ
    from rank to rank. Weights that differ are averaged, whole numbers and the like taken
    from rank 0; weights that are equal, such as a frozen backbone's, keep their bits.

    Collective: every rank; blocks.

    Args:
        model: a built Keras model.

    Raises:
        MismatchError: the models differ; raised on every rank.
    """
    comm = runtime.communicator()
    if comm.size == 1:
        return
    weights = list(model.non_trainable_weights)
    different = [weights[index] for index in _differing(comm, weights)]
    floats = [w for w in different if keras.backend.is_float_dtype(w.dtype)]
    others = [w for w in different if not keras.backend.is_float_dtype(w.dtype)]
    averaged = _engine.allreduce(
        comm,
        [_to_numpy(weight) for weight in floats],
        [variable_name(weight) for weight in floats],
        _engine.ReduceOp.AVERAGE,
        runtime.bucket_nbytes(comm),
    )
    copied = _engine.broadcast(
        comm,
        [_to_numpy(weight) for weight in others],
        [variable_name(weight) for weight in others],
        root=0,
    )
    for weight, value in zip(floats + others, averaged + copied, strict=True):
        weight.assign(value)


def verify_replicas(model: keras.Model) -> None:
    """Checks that weights and optimizer state have the same bits on all ranks.

    Variables that the optimizer keeps local, and their optimizer state, are left out. Only
    digests travel, 16 bytes a variable.

    Collective: every rank; blocks.

    Args:
        model: a Keras model.

    Raises:
        MismatchError: they differ; the text names the variables and the ranks. Raised on
            every rank.

    Example:
    ```python
    model.fit(x, y, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    ```
    """
    comm = runtime.communicator()
    variables = _without(model, local_variables(model))
    different = _differing(comm, variables)
    if not different:
        return
    names = [
        f"{variable_name(variables[index])} (ranks {', '.join(map(str, ranks))})"
        for index, ranks in different.items()
    ]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise errors.MismatchError(
        errors.explain(
            comm.where(),
            f"the {len(variables)} variables of model {model.name!r} to be equal on all ranks",
            f"differences from rank 0 in {'; '.join(names[:8])}{more}",
            "Pass keras_dist.callbacks() to fit, wrap the optimizer in "
            "keras_dist.DistributedOptimizer, and change weights on all ranks alike.",
        )
    )


def verify_once(model: keras.Model, moment: str) -> None:
    """Does as `verify_replicas`, unless it has at this moment and after this update.

    Collective: every rank; blocks.

    Args:
        model: a Keras model.
        moment: a name for what is about to happen.

    Raises:
        MismatchError: the replicas differ; raised on every rank.
    """
    now = (moment, [int(one.iterations) for one in optimizers_of(model)])
    if model.__dict__.get(VERIFIED) != now:
        verify_replicas(model)
        object.__setattr__(model, VERIFIED, now)


def variable_name(variable: Any) -> str:
    """Returns the path by which a user knows a variable, such as `dense/kernel`."""
    path = getattr(variable, "path", None) or variable.name
    return re.sub(r":\d+$", "", str(path))


def bytes_of(variable: Any) -> np.ndarray:
    """Returns the bytes of a variable's value, whatever its dtype, as a flat uint8 array."""
    return np.ascontiguousarray(_to_numpy(variable)).reshape(-1).view(np.uint8)


def _without(model: keras.Model, variables: Iterable[Any]) -> list[Any]:
    """Returns a model's state but for some variables and the optimizer's state of each."""
    left_out = _with_slots(optimizers_of(model), variables)
    return [variable for variable in state(model) if id(variable) not in left_out]


def _with_slots(optimizers: Iterable[Any], variables: Iterable[Any]) -> set[int]:
    """Returns the ids of some variables and of what optimizers keep for each."""
    left_out = {id(variable) for variable in variables}
    for one in optimizers:
        trainable = list(getattr(one, "_trainable_variables", ()))
        places = [place for place, variable in enumerate(trainable) if id(variable) in left_out]
        # Keras' optimizers keep what belongs to each variable in lists as long as theirs.
        for name, slots in vars(one).items() if places else ():
            if name != "_variables" and isinstance(slots, list) and len(slots) == len(trainable):
                left_out.update(id(slots[place]) for place in places)
    return left_out


def _to_numpy(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _own_seed(generator_state: np.ndarray, rank: int) -> np.ndarray:
    """Returns the state (seed, counter) of a generator with the seed made this rank's own."""
    own = generator_state.copy()
    seed = int(generator_state[0]) & 0xFFFFFFFF
    drawn = np.random.SeedSequence([seed, rank]).generate_state(1, np.uint32)
    own[0] = drawn.astype(own.dtype)[0]
    return own


def _differing(comm: _engine.Communicator, variables: Sequence[Any]) -> dict[int, list[int]]:
    """Returns the indices of variables that are not equal everywhere, and on which ranks."""
    names = [variable_name(variable) for variable in variables]
    digests = [hashlib.blake2b(bytes_of(v).data, digest_size=16).digest() for v in variables]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(1, -1, 16)
    everyone = _engine.allgather(comm, mine, f"the digests of {len(names)} variables")
    odd = (everyone != everyone[:1]).any(axis=2)
    return {
        int(index): [int(rank) for rank in np.flatnonzero(odd[:, index])]
        for index in np.flatnonzero(odd.any(axis=0))
    }
