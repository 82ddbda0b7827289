"""Differentiable data movement of arrays, inside and outside `jax.jit`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_dist import _engine, errors, ops, runtime
from keras_dist._backends.jax_callback import differentiable
from keras_dist.jax.differentiable_host_callback import host_callback, of_floats
from keras_dist.ops.face import face, own_rows
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set


@face(ops.allgather)
def allgather(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The gradient is this rank's rows of the gradients averaged over ranks, as in Horovod.

    Inside `jax.jit`, the lengths must be equal on all ranks.
    """
    return grouped_allgather([array], name, process_set)[0]


@face(ops.grouped_allgather)
def grouped_allgather(
    arrays: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    lengths: Sequence[int] | None = None,
) -> list[Any]:
    """The gradient is that of `allgather`.

    Inside `jax.jit`, lengths must be equal on all ranks, or `lengths` must be given.

    Args:
        lengths: lengths of the results inside `jax.jit`. Defaults to those of arrays with equal
            lengths on all ranks.
    """
    comm = runtime.communicator(process_set)
    given = list(map(jax.numpy.asarray, arrays))
    own = [array.shape[0] if array.ndim else 0 for array in given]

    def gather(given: list[Any]) -> list[Any]:
        return ops.grouped_allgather(given, name, process_set)

    def run(given: list[Any]) -> list[Any]:
        equal = [comm.size * length for length in own]
        pairs = zip(given, equal if lengths is None else lengths, strict=True)
        shapes = [(length, *array.shape[1:]) if array.ndim else () for array, length in pairs]
        return host_callback(gather, given, shapes)

    def average(gradients: list[Any], own: list[int]) -> list[Any]:
        pairs = zip(own, gradients, strict=True)
        shapes = [(length, *gradient.shape[1:]) for length, gradient in pairs]
        gathered = [gradient.shape[0] for gradient in gradients]

        def take(gradients: list[Any]) -> list[Any]:
            return host_callback(lambda g: own_rows(g, own, name, process_set), gradients, shapes)

        def spread(gradients: list[Any]) -> list[Any]:
            joined = grouped_allgather(gradients, name, process_set, gathered)
            return [rows / comm.size for rows in joined]

        return differentiable(take, spread, gradients)

    return differentiable(run, lambda gradients: of_floats(average, gradients, own), given)


@face(ops.alltoall)
def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The gradient sends the rows back.

    Args:
        splits: as in `keras_dist.alltoall`, outside `jax.jit` only.

    Raises:
        ArgumentError: `splits` inside `jax.jit`; `array` is a scalar, or `splits` does not fit it.
    """
    comm = runtime.communicator(process_set)

    def exchange(given: Any, counts: Any) -> tuple[Any, Any]:
        """Returns the rows and, outside `jax.jit`, how many came from each rank."""
        found: list[np.ndarray] = []

        def send(arrays: list[Any]) -> list[Any]:
            rows, received = _engine.collectives.alltoall(
                comm, arrays[0], counts, name or "value", name
            )
            found.append(received)
            return [rows]

        return host_callback(send, [given], [given.shape])[0], found[0] if found else None

    given = jax.numpy.asarray(array)
    shape, received = given.shape, None

    def run(given: Any) -> Any:
        nonlocal received
        if splits is not None:
            _check_is_concrete(given)
        rows, received = exchange(given, splits)
        return rows if splits is None else (rows, received)

    def send_back(gradient: Any) -> Any:
        if received is None:  # inside `jax.jit`, where equal numbers were sent
            return exchange(gradient, None)[0]
        rows, _ = exchange(gradient, received)
        unsent = jax.numpy.zeros((shape[0] - len(rows), *rows.shape[1:]), rows.dtype)
        return jax.numpy.concatenate([rows, unsent])

    def send_again(gradient: Any) -> Any:
        sent = alltoall(gradient, splits, name, process_set)
        return sent if splits is None else sent[0]

    def back(gradient: Any) -> Any:
        return differentiable(send_back, send_again, gradient if splits is None else gradient[0])

    return differentiable(run, back, given)


@face(ops.broadcast)
def broadcast(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The gradient on the root is the average over ranks, on other ranks zero, as in Horovod."""

    def run(given: Any) -> Any:
        def send(arrays: list[Any]) -> list[Any]:
            return [ops.broadcast(arrays[0], root_rank, name, process_set)]

        return host_callback(send, [given], [given.shape])[0]

    def average(gradient: Any) -> Any:
        def reduce(arrays: list[Any]) -> list[Any]:
            return [ops.allreduce(arrays[0], name=name, process_set=process_set)]

        averaged = host_callback(reduce, [gradient], [gradient.shape])[0]
        return averaged if runtime.rank() == root_rank else jax.numpy.zeros_like(averaged)

    def spread(gradient: Any) -> Any:
        sent = broadcast(gradient, root_rank, name, process_set)
        return sent / runtime.communicator(process_set).size

    def back(gradient: Any) -> Any:
        return differentiable(average, spread, gradient)

    return differentiable(run, back, jax.numpy.asarray(array))


@raises_on_all
def broadcast_parameters(
    tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcasts a pytree of the root, such as weights or the state of an optimizer.

    Collective: every rank; the trees must have the same structure, shapes and dtypes; blocks. Not
    for use inside `jax.jit`.

    Args:
        tree: pytree of arrays, numbers and keys of `jax.random`; it is not changed.
        root_rank: rank in the job that sends its tree. Defaults to 0.
        process_set: as in `allreduce`.

    Returns:
        The root's pytree. JAX arrays, numpy arrays and numbers keep their types and dtypes.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    # The paths, since the text of a structure with functions in it differs between ranks.
    name = " ".join(jax.tree_util.keystr(path) for path, _ in named)
    leaves = [leaf for _, leaf in named]
    copies = [np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]
    if copies:
        ops.broadcast_(copies, root_rank, name, process_set)
    return jax.tree.unflatten(structure, map(_like, leaves, copies))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, array: np.ndarray) -> Any:
    """Returns an array as an object of the type of a leaf."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(array, leaf.sharding if leaf.committed else None)
    if isinstance(leaf, np.generic):
        return array[()]
    return type(leaf)(array.item()) if isinstance(leaf, int | float | complex) else array


def _check_is_concrete(array: Any) -> None:
    if isinstance(array, jax.core.Tracer):
        raise errors.ArgumentError(
            runtime.where(),
            "no splits in an alltoall of jax.jit, where lengths must be static",
            f"splits for {array}",
            "Omit splits, or call alltoall outside jax.jit.",
        )
