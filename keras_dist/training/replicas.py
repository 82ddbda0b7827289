"""Broadcast, averaging and verification of the replicas of a model, without random generators."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.training import built_optimizers, layer_state, sharded_state
from keras_dist.training.layer_state import DIGEST_NBYTES
from keras_dist.training.model_state import (
    accumulated,
    bytes_of,
    clear_accumulators,
    host_array,
    optimizers_of,
    rounds_of,
    shared_state,
    state_of_steps,
    to_numpy,
    value_of,
    variable_name,
)
from keras_dist.training.rank_exchanges import allgather_object, allreduce

# Attribute of a model: the event at which its replicas were last verified.
VERIFIED = "_keras_dist_verified"
MOST_THREADS = 4
MOST_NBYTES = 256 * 2**20  # of variables that are received at once
LAYERS = "the broadcast of the layers of a model"
ADAPT = (
    "Adapt the layer with keras_dist.adapt, or on the root before the broadcast; pass the same "
    "constants on every rank."
)


def broadcast_state(model: keras.Model, root_rank: int = 0) -> None:
    """Broadcasts weights, layer and optimizer state of the root to all ranks. Collective."""
    model.__dict__.pop(VERIFIED, None)
    for rounds in filter(None, map(rounds_of, optimizers_of(model))):
        # A round that has begun ends without an average.
        rounds.restart()
    # Sharded optimizer state is that which the root has loaded, if it has loaded any.
    sharded_state.share_loaded(model, root_rank)
    comm = runtime.fit_communicator()
    # Local variables, their layers and their optimizer state are unchanged.
    with broadcast_layers(comm, model, root_rank):
        broadcast_variables(comm, [*shared_state(model), *state_of_steps(model)], root_rank)


def build_optimizers_alike(model: keras.Model) -> None:
    """Builds the optimizers of a model that are built on other ranks. Collective; blocks."""
    mine = built_optimizers.describe(model)
    descriptions = allgather_object(mine, "the optimizers that are built")
    built_optimizers.build(model, built_optimizers.merge(descriptions))


def broadcast_variables(
    comm: _engine.Communicator, variables: Sequence[Any], root_rank: int
) -> None:
    """Broadcasts the values of Keras variables, of the rank `root_rank` of the job.

    Collective: the ranks of `comm`; blocks. All raise a `MismatchError` if the variables differ.
    """
    backend = _backends.active()
    variables = variables if comm.size > 1 else []
    values, names = list(map(value_of, variables)), list(map(variable_name, variables))
    arrays = backend.engine_arrays(values)
    messages = {"operation": "the broadcast of a model", "remedy": SAME_MODEL}
    # The ranks compare all of them before the first part is assigned.
    _engine.collectives.barrier(comm, arrays=arrays, names=names, **messages)
    for some in _parts(arrays):
        received = _engine.collectives.broadcast(
            comm, arrays[some], names[some], root_rank, **messages
        )
        # The root waits as well: before that, its variables must not be written to.
        found = list(map(backend.tensor_of, received, values[some]))
        if comm.job.rank != root_rank:
            for variable, value in zip(variables[some], found, strict=True):
                variable.assign(value)


def _parts(arrays: Sequence[Any]) -> list[slice]:
    """Returns the parts of a list that are received at once: that takes as much memory."""
    starts, nbytes = [0], 0
    for index, array in enumerate(arrays):
        nbytes += array.nbytes
        if nbytes > MOST_NBYTES and index > starts[-1]:
            starts.append(index)
            nbytes = array.nbytes
    return [slice(*pair) for pair in itertools.pairwise([*starts, len(arrays)])]


def average_accumulated(model: keras.Model) -> bool:
    """Averages gradients that wait for the next update, and tells if there are any. Collective."""
    # The update averages over the ranks as well, so it stays the same, up to rounding.
    variables = accumulated(model)
    if variables:
        own, names = list(map(to_numpy, variables)), list(map(variable_name, variables))
        found = allreduce(runtime.fit_communicator(), own, names, _engine.ReduceOp.AVERAGE)
        for variable, value in zip(variables, found, strict=True):
            variable.assign(value)
    return bool(variables)


def restore_accumulated(model: keras.Model, root_rank: int, are_saved: bool) -> None:
    """Broadcasts gradients that wait for the next update from the root. Collective; blocks."""
    kept = accumulated(model) if are_saved else []
    # Those of another rank must not be applied.
    clear_accumulators(optimizers_of(model), besides=kept)
    if kept and runtime.is_initialized():  # otherwise this process has read them alone
        broadcast_variables(runtime.fit_communicator(), kept, root_rank)


def average_statistics(model: keras.Model) -> dict[int, np.ndarray]:
    """Makes non-trainable weights equal on all ranks. Collective; blocks."""
    # The moving statistics of batch normalization differ from rank to rank. Weights of a float
    # dtype that differ are averaged, other weights that differ are broadcast from rank 0. Equal
    # weights, for example of a frozen backbone, keep their bits.
    comm = runtime.fit_communicator()
    if comm.size == 1:
        return {}
    weights = list(model.non_trainable_weights)
    own = {
        index: to_numpy(weights[index]).copy() for index in differing(comm, _digests(comm, weights))
    }
    different = [weights[index] for index in own]
    floats = [w for w in different if keras.backend.is_float_dtype(w.dtype)]
    others = [w for w in different if not keras.backend.is_float_dtype(w.dtype)]
    values, names = list(map(to_numpy, floats)), list(map(variable_name, floats))
    averaged = allreduce(comm, values, names, _engine.ReduceOp.AVERAGE)
    values, names = list(map(to_numpy, others)), list(map(variable_name, others))
    copied = _engine.collectives.broadcast(comm, values, names, root=comm.ranks[0])
    for weight, value in zip(floats + others, averaged + copied, strict=True):
        weight.assign(value)
    if own:
        layer_state.write(model, None)
    return own


def verify_replicas(model: keras.Model) -> None:
    """Checks that weights, layer state and optimizer state have the same bits on all ranks.

    The state of a layer is what it computes with besides its variables: a vocabulary, boundaries of
    bins, constants such as those of `Normalization`, and of your own layers what they save, and
    the arrays and floats that they hold as attributes if they define `finalize_state`,
    `load_own_variables` or `load_assets`.

    Excludes local variables, their layers and their optimizer state. Compares digests of 16 bytes
    per variable and layer.

    Collective: every rank; blocks.

    Args:
        model: a Keras model.

    Raises:
        MismatchError: the replicas differ; the message names variables and ranks. Raised on
            every rank.

    Example:
    ```python
    model.fit(x, y, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    ```
    """
    _verify(model, _digest)


def verify_sums(model: keras.Model) -> None:
    """Does the same by sums of the words of each variable, at the speed of memory."""
    # A sum misses differences that cancel each other out, such as 8-byte words that have changed
    # places; differences that have nothing to do with each other are missed once in 2**64.
    _verify(model, _sum)


def _verify(model: keras.Model, digest: Callable[[Any], bytes]) -> None:
    comm = runtime.fit_communicator()
    variables = shared_state(model)
    layers = layer_state.digests(model)
    digests = _digests(comm, variables, digest)
    different = differing(comm, [*digests, *(each for _, each in layers)])
    if not different:
        return
    names = [*map(variable_name, variables), *(name for name, _ in layers)]
    remedy = (
        "Pass keras_dist.callbacks() to fit, wrap the optimizer in "
        "keras_dist.DistributedOptimizer, and change weights equally on all ranks."
    )
    if any(each.taken for each in map(rounds_of, optimizers_of(model)) if each is not None):
        remedy = "Call optimizer.finish_round() first: a round of local steps has begun."
    raise errors.MismatchError(
        f"the {len(variables)} variables of model {model.name!r} to be equal on all ranks"
        + (f", and what {len(layers)} layers keep besides them" if layers else ""),
        described(names, different),
        f"{remedy} {ADAPT}" if max(different) >= len(variables) else remedy,
    )


def verify_once(model: keras.Model, event: str) -> None:
    """Calls `verify_replicas` once per event and optimizer step. Collective; blocks."""
    # Ranks that make local steps may skip different ones, by their loss scales.
    own = {id(variable) for variable in state_of_steps(model)}
    optimizers = optimizers_of(model)
    steps = [int(each.iterations) for each in optimizers if id(each.iterations) not in own]
    rounds = [each.ended for each in map(rounds_of, optimizers) if each is not None]
    now = (event, steps, rounds)
    if model.__dict__.get(VERIFIED) != now:
        verify_replicas(model)
        object.__setattr__(model, VERIFIED, now)


def _digest(variable: Any) -> bytes:
    return hashlib.blake2b(bytes_of(variable).data, digest_size=DIGEST_NBYTES).digest()


def _digests(
    comm: _engine.Communicator, variables: Sequence[Any], digest: Callable[[Any], bytes] = _digest
) -> list[bytes]:
    # Hashing, and copies of a GPU, release the interpreter.
    with ThreadPoolExecutor(min(MOST_THREADS, max(1, comm.job.fewest_cores))) as threads:
        return list(threads.map(digest, variables))


def _sum(variable: Any) -> bytes:
    """Returns the sum of the words of a variable, and that of the bytes behind the last word."""
    data = np.ascontiguousarray(host_array(variable)).reshape(-1).view(np.uint8)
    words = data[: data.size // 8 * 8].view(np.uint64)
    rest = data[words.nbytes :]
    return np.array([np.add.reduce(words), np.add.reduce(rest)], np.uint64).tobytes()


def differing(comm: _engine.Communicator, digests: Sequence[bytes]) -> dict[int, list[int]]:
    """Returns the ranks that differ from rank 0, by index of the digest, of `DIGEST_NBYTES`."""
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(1, -1, DIGEST_NBYTES)
    gathered = _engine.collectives.allgather(comm, mine, f"the digests of {len(digests)} variables")
    differs = (gathered != gathered[:1]).any(axis=2)  # shape (ranks, variables)
    return {
        int(index): np.flatnonzero(differs[:, index]).tolist()
        for index in np.flatnonzero(differs.any(axis=0))
    }


def described(names: Sequence[str], different: Mapping[int, Sequence[int]]) -> str:
    """Returns a phrase that names at most eight differences, by index, and their ranks."""
    found = [f"{names[at]} (ranks {', '.join(map(str, ranks))})" for at, ranks in different.items()]
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"differences from rank 0 in {'; '.join(found[:8])}{more}"


@contextlib.contextmanager
def broadcast_layers(
    comm: _engine.Communicator, model: keras.Model, root_rank: int
) -> Iterator[None]:
    """Broadcasts what layers keep besides variables, which are set within. Collective; blocks."""
    if not layer_state.is_stateful(model):
        yield
        return
    is_root = comm.job.rank == root_rank
    with _of_layers(comm):
        mine = layer_state.read(model) if is_root else None
    kept = _engine.collectives.broadcast_object(comm, mine, root_rank, LAYERS)
    with _of_layers(comm):
        kept = layer_state.without_local(model, kept)
        # First, since the shapes of variables may depend on the size of a vocabulary.
        layer_state.write_tables(model, kept)
    yield
    with _of_layers(comm):
        layer_state.refresh(model, None if is_root else kept)
    found = layer_state.digests(model)
    if different := differing(comm, [digest for _, digest in found]):
        expected = f"the layers of model {model.name!r} to compute with the same on all ranks"
        text = described([name for name, _ in found], different)
        raise errors.MismatchError(expected, text, ADAPT)
    layer_state.retrace_if_changed(model)


@contextlib.contextmanager
def _of_layers(comm: _engine.Communicator) -> Iterator[None]:
    """Raises an error of a layer as a `MismatchError` on every rank."""
    with _engine.collectives.raise_on_all(comm, LAYERS):
        try:
            yield
        except Exception as error:  # of a user's method
            expected = "every layer to take the state that it has on the root"
            raise errors.MismatchError(expected, str(error), ADAPT) from error
