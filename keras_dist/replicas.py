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
    "average_statistics",
    "broadcast_state",
    "random_states",
    "separate_seeds",
    "state",
    "variable_name",
    "verify_replicas",
]

SAME_MODEL = "Build the same model, with the same optimizer, on every rank."


def state(model: keras.Model) -> list[Any]:
    """Returns the variables that must be equal on all ranks, each once.

    Args:
        model: a Keras model; its optimizer's variables count when it has been built.

    Returns:
        List of Keras variables, in the same order on every rank.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = list(model.weights) + (list(optimizer.variables) if optimizer else [])
    own = {id(variable) for variable in _accumulators(optimizer)}
    return list({id(v): v for v in variables if id(v) not in own}.values())


def broadcast_state(model: keras.Model, root_rank: int = 0, exclude: Iterable[Any] = ()) -> None:
    """Gives every rank the root's weights and optimizer state.

    Collective: every rank; the model must be built and its architecture the same; blocks.

    Args:
        model: a built Keras model.
        root_rank: the rank whose state all receive. Defaults to 0.
        exclude: variables that each rank keeps for itself, with what the optimizer keeps
            for each of them.

    Raises:
        MismatchError: the models differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank.
    """
    comm = runtime.communicator()
    variables = _without(model, exclude)
    received = _engine.broadcast(
        comm,
        [_to_numpy(variable) for variable in variables],
        [variable_name(variable) for variable in variables],
        root_rank,
        operation="the broadcast of a model",
        remedy=SAME_MODEL,
    )
    if comm.rank != root_rank:
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
    reduction = getattr(getattr(model, "optimizer", None), "_keras_dist", None)
    variables = _without(model, reduction.local_variables() if reduction else ())
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


def variable_name(variable: Any) -> str:
    """Returns the path by which a user knows a variable, such as `dense/kernel`."""
    path = getattr(variable, "path", None) or variable.name
    return re.sub(r":\d+$", "", str(path))


def _without(model: keras.Model, variables: Iterable[Any]) -> list[Any]:
    """Returns a model's state but for some variables and the optimizer's state of each."""
    left_out = {id(variable) for variable in variables}
    optimizer = getattr(model, "optimizer", None)
    # A `MultiOptimizer` leaves the variables to others.
    for one in (optimizer, *getattr(optimizer, "optimizers", ())):
        trainable = list(getattr(one, "_trainable_variables", ()))
        places = [place for place, variable in enumerate(trainable) if id(variable) in left_out]
        # Keras' optimizers keep what belongs to each variable in lists as long as theirs.
        for name, slots in vars(one).items() if places else ():
            if name != "_variables" and isinstance(slots, list) and len(slots) == len(trainable):
                left_out.update(id(slots[place]) for place in places)
    return [variable for variable in state(model) if id(variable) not in left_out]


def _accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which a rank gathers its own gradients between two updates."""
    if optimizer is None:
        return []
    inner = getattr(optimizer, "inner_optimizer", None)
    own = getattr(optimizer, "_accumulated_gradients", None) or []
    return [v for v in own if v is not None] + _accumulators(inner)


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
    digests = [hashlib.blake2b(_to_numpy(v).tobytes(), digest_size=16).digest() for v in variables]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(1, -1, 16)
    everyone = _engine.allgather(comm, mine, f"the digests of {len(names)} variables")
    odd = (everyone != everyone[:1]).any(axis=2)
    return {
        int(index): [int(rank) for rank in np.flatnonzero(odd[:, index])]
        for index in np.flatnonzero(odd.any(axis=0))
    }
