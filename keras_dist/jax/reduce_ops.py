"""Reductions of arrays and of trees of arrays, with gradients, in and out of `jax.jit`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from keras_dist import ops, runtime
from keras_dist.jax.differentiable_host_callback import differentiable, on_host
from keras_dist.jax.exchange_ops import grouped_allgather
from keras_dist.ops.compression import Compression
from keras_dist.ops.reduce_op import Average, ReduceOp, Sum
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allreduce",
    "average_gradients",
    "grouped_allreduce",
    "grouped_reducescatter",
    "pmean",
    "psum",
    "reducescatter",
]


@raises_on_all
def allreduce(
    array: Any,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> Any:
    """Combines the arrays of all ranks into one, with the same bits on each.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    The gradient of a sum or an average is that of the ranks' losses together: the same reduction
    of their gradients. Other ops have none.

    Args:
        array: an array of any numeric dtype, bfloat16 included, also within `jax.jit`.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`, or its name. Defaults to
            `Average`.
        name: a name, by which calls that ranks make in different orders find each other.
        prescale_factor: every rank's array is multiplied by it first. Defaults to 1.0.
        postscale_factor: the result is multiplied by it. Defaults to 1.0.
        process_set: the ranks that take part. Defaults to all.
        compression: what it looks like between nodes. Defaults to `Compression.none`.

    Returns:
        New array of the shape and dtype of `array`.

    Raises:
        MismatchError: the ranks differ; raised on every rank. Inside of `jax.jit` it comes as an
            error of JAX that tells it.
        ArgumentError: an argument cannot be used.
    """
    how = op, name, prescale_factor, postscale_factor, process_set, compression
    return grouped_allreduce([array], *how)[0]


@raises_on_all
def grouped_allreduce(
    arrays: Sequence[Any],
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> list[Any]:
    """Does `allreduce` for a list of arrays at once: small ones travel together.

    Collective: as `allreduce`.

    Args:
        arrays: list of arrays; dtypes may differ.
        op: as for `allreduce`.
        name: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`.
        compression: as for `allreduce`.

    Returns:
        List of new arrays.
    """
    how = op, name, prescale_factor, postscale_factor, process_set, compression
    run = functools.partial(_allreduce, how)
    given = list(map(jax.numpy.asarray, arrays))
    if getattr(op, "value", str(op).lower()) not in (Average.value, Sum.value):
        return run(given)
    forward, backward = lambda given: (run(given), None), lambda _, gradients: (run(gradients),)
    return differentiable(run, forward, backward, given)


@raises_on_all
def reducescatter(
    array: Any,
    op: ReduceOp | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combines the arrays of all ranks and gives each rank its part of the rows.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    Rows are shared out in rank order; where they do not divide, the first ranks get one more. The
    gradient is an allgather of the ranks' gradients, as in Horovod times the number of ranks where
    `op` is `Sum`.

    Args:
        array: an array with at least one dimension, also within `jax.jit`.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        name: as for `allreduce`.
        process_set: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        New array: this rank's rows of the result.
    """
    how = op, name, process_set, prescale_factor, postscale_factor
    return grouped_reducescatter([array], *how)[0]


@raises_on_all
def grouped_reducescatter(
    arrays: Sequence[Any],
    op: ReduceOp | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Does `reducescatter` for a list of arrays at once: they travel together.

    Collective: as `reducescatter`.

    Args:
        arrays: list of arrays with at least one dimension; dtypes may differ.
        op: as for `reducescatter`.
        name: as for `allreduce`.
        process_set: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        List of new arrays: this rank's rows of each.
    """
    comm = runtime.communicator(process_set)
    sums = getattr(op, "value", str(op).lower()) == Sum.value
    factor = prescale_factor * postscale_factor * (comm.size if sums else 1)

    def scatter(given: list[Any]) -> list[Any]:
        how = op, name, prescale_factor, postscale_factor, process_set
        return ops.grouped_reducescatter(given, *how)

    def rows_of(array: Any) -> tuple[int, ...]:
        rows = array.shape[0] if array.ndim else 0
        return (rows // comm.size + (comm.rank < rows % comm.size), *array.shape[1:])

    def run(given: list[Any]) -> list[Any]:
        return on_host(scatter, given, [rows_of(array) for array in given])

    def back(lengths: list[int], gradients: list[Any]) -> tuple[list[Any]]:
        whole = grouped_allgather(gradients, name, process_set, lengths)
        return ([factor * gradient for gradient in whole],)

    def forward(given: list[Any]) -> tuple[list[Any], list[int]]:
        return run(given), [len(array) for array in given]

    return differentiable(run, forward, back, list(map(jax.numpy.asarray, arrays)))


def pmean(tree: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Averages a tree of arrays over the ranks, as `jax.lax.pmean` does over devices.

    Collective: every rank; the trees must be alike; blocks. All leaves travel together.

    Args:
        tree: arrays in any containers, such as the gradients of `jax.grad`; also in `jax.jit`.
        process_set: the ranks that take part. Defaults to all.

    Returns:
        A tree of the same structure.

    Example:
    ```python
    import jax
    import keras_dist.jax as hvd

    def loss_of(weights, batch):
        return ((batch @ weights["kernel"]) ** 2).mean()

    @jax.jit
    def step(weights, batch):
        gradients = hvd.pmean(jax.grad(loss_of)(weights, batch))
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)
    ```
    """
    return _mapped(tree, Average, process_set)


def psum(tree: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Adds up a tree of arrays over the ranks, as `jax.lax.psum` does. See `pmean`.

    Collective: as `pmean`.

    Args:
        tree: as for `pmean`.
        process_set: as for `pmean`.
    """
    return _mapped(tree, Sum, process_set)


average_gradients = pmean


def _mapped(tree: Any, op: ReduceOp, process_set: ProcessSet) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    reduced = grouped_allreduce(leaves, op, process_set=process_set) if leaves else leaves
    return jax.tree.unflatten(structure, reduced)


def _allreduce(how: Any, arrays: list[Any]) -> list[Any]:
    def reduce(given: list[Any]) -> list[Any]:
        return ops.grouped_allreduce(given, *how)

    return on_host(reduce, arrays, [array.shape for array in arrays])
