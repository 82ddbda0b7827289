"""Arrays that go from rank to rank as they are, with gradients, in and out of `jax.jit`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_dist import collectives, runtime
from keras_dist.jax.host import differentiable, on_host
from keras_dist.process_sets import ProcessSet, global_process_set

__all__ = ["allgather", "alltoall", "broadcast", "broadcast_parameters", "grouped_allgather"]


def allgather(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Joins the arrays of all ranks along their first dimension, in rank order.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Inside of `jax.jit` the lengths must be equal. The gradient is, as in Horovod, this rank's rows
    of the average of the ranks' gradients.

    Args:
        array: an array with at least one dimension.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part. Defaults to all.

    Returns:
        New array whose length is the sum of the ranks' lengths.
    """
    comm = runtime.communicator(process_set)

    def run(given: Any) -> Any:
        return grouped_allgather([given], name, process_set)[0]

    def back(length: int, gradient: Any) -> tuple[Any]:
        def mine(given: list[np.ndarray]) -> list[np.ndarray]:
            averaged = collectives.allreduce(given[0], name=name, process_set=process_set)
            lengths = collectives.allgather([length], name, process_set)
            begin = int(lengths[: comm.rank].sum())
            return [averaged[begin : begin + length]]

        return (on_host(mine, [gradient], [(length, *gradient.shape[1:])])[0],)

    given = jax.numpy.asarray(array)
    return differentiable(run, lambda given: (run(given), given.shape[0]), back, given)


def grouped_allgather(
    arrays: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    lengths: Sequence[int] | None = None,
) -> list[Any]:
    """Does `allgather`, without gradients, for a list of arrays at once: they travel together.

    Collective: as `allgather`.

    Args:
        arrays: list of arrays; dtypes may differ.
        name: as for `allgather`.
        process_set: as for `allgather`.
        lengths: of the results inside of `jax.jit`. Defaults to those of equal lengths.

    Returns:
        List of new arrays.
    """
    size = runtime.communicator(process_set).size
    given = [jax.numpy.asarray(array) for array in arrays]

    def gather(given: list[Any]) -> list[Any]:
        return collectives.grouped_allgather(given, name, process_set)

    equal = [size * one.shape[0] if one.ndim else 0 for one in given]
    pairs = zip(given, equal if lengths is None else lengths, strict=True)
    shapes = [(length, *one.shape[1:]) if one.ndim else () for one, length in pairs]
    return on_host(gather, given, shapes)


def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows of each rank to each rank. Its gradient sends their gradients back.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        array: an array with at least one dimension: its first rows go to rank 0, and so on.
        splits: how many rows each rank gets, whole numbers; outside of `jax.jit` alone. Defaults
            to equal numbers, for which the length must divide by the number of ranks.
        name: as for `allgather`.
        process_set: as for `allgather`.

    Returns:
        New array. With `splits` a pair: that array, and how many rows came from each rank; this
        form has no gradient.
    """
    if splits is not None:
        rows, received = collectives.alltoall(np.asarray(array), splits, name, process_set)
        return jax.numpy.asarray(rows), received

    def run(given: Any) -> Any:
        def exchange(arrays: list[Any]) -> list[Any]:
            return [collectives.alltoall(arrays[0], None, name, process_set)]

        return on_host(exchange, [given], [given.shape])[0]

    forward, backward = lambda given: (run(given), None), lambda _, gradient: (run(gradient),)
    return differentiable(run, forward, backward, jax.numpy.asarray(array))


def broadcast(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's array on every rank.

    Collective: every rank; shape, dtype, `root_rank` and `name` must agree; blocks.

    The gradient is, as in Horovod, the average of the ranks' gradients on the root, 0 elsewhere.

    Args:
        array: an array; only the root's values count.
        root_rank: the rank whose array all receive, by its number in the job. Defaults to 0.
        name: as for `allgather`.
        process_set: as for `allgather`.
    """

    def run(given: Any) -> Any:
        def send(arrays: list[Any]) -> list[Any]:
            return [collectives.broadcast(arrays[0], root_rank, name, process_set)]

        return on_host(send, [given], [given.shape])[0]

    def back(_: None, gradient: Any) -> tuple[Any]:
        def average(arrays: list[Any]) -> list[Any]:
            return [collectives.allreduce(arrays[0], name=name, process_set=process_set)]

        averaged = on_host(average, [gradient], [gradient.shape])[0]
        return (averaged if runtime.rank() == root_rank else jax.numpy.zeros_like(averaged),)

    return differentiable(run, lambda given: (run(given), None), back, jax.numpy.asarray(array))


def broadcast_parameters(
    tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's tree of arrays on every rank: weights, or the state of an optimizer.

    Collective: every rank; the trees must be alike; blocks. Not for `jax.jit`.

    Args:
        tree: arrays and numbers in any containers; it stays as it is.
        root_rank: the rank whose values all receive. Defaults to 0.
        process_set: the ranks that take part. Defaults to all.

    Returns:
        A tree of the same structure.
    """
    leaves, structure = jax.tree.flatten(tree)
    given = [jax.numpy.asarray(leaf) for leaf in leaves]

    def send(arrays: list[Any]) -> list[Any]:
        copies = [np.array(array) for array in arrays]
        collectives.broadcast_(copies, root_rank, str(structure), process_set)
        return copies

    sent = on_host(send, given, [array.shape for array in given]) if given else given
    return jax.tree.unflatten(structure, sent)
