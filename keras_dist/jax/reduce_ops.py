"""Differentiable reductions of arrays and pytrees, inside and outside `jax.jit`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_dist import ops, runtime
from keras_dist._backends.jax_callback import differentiable
from keras_dist._compat.jax import release_dropped
from keras_dist.jax.differentiable_host_callback import as_jax, host_callback, of_floats
from keras_dist.jax.exchange_ops import grouped_allgather
from keras_dist.ops.face import Reduction, face
from keras_dist.ops.reduce_op import Average, Compression, ReduceOp, Sum
from keras_dist.runtime.process_sets import ProcessSet, global_process_set


@face(ops.allreduce)
def allreduce(
    array: Any,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> Any:
    """The gradient of `Average` and `Sum` is the same reduction of gradients; other ops have none.

    Args:
        compression: as in `keras_dist.allreduce`. Defaults to `Compression.none`.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank. Inside `jax.jit`,
            JAX raises an error of its own with the same text.
    """
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        release_dropped()
        reduced = ops.allreduce(
            np.asarray(array), op, name, prescale_factor, postscale_factor, process_set, compression
        )
        return as_jax(reduced, array)
    return grouped_allreduce(
        [array], op, name, prescale_factor, postscale_factor, process_set, compression
    )[0]


@face(ops.grouped_allreduce)
def grouped_allreduce(
    arrays: Sequence[Any],
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = Compression.none,
) -> list[Any]:
    """The gradient is that of `allreduce`."""
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set, compression)

    def run(given: list[Any]) -> list[Any]:
        shapes = [array.shape for array in given]
        into = reduction.allreduce_into if len(given) == 1 else None
        return host_callback(reduction.allreduce, given, shapes, into)

    def back(gradients: list[Any]) -> list[Any]:
        reduction.check_differentiable()
        return reduce(gradients)

    def reduce(given: list[Any]) -> list[Any]:
        return differentiable(run, functools.partial(of_floats, back), given)

    return reduce(list(map(jax.numpy.asarray, arrays)))


@face(ops.reducescatter)
def reducescatter(
    array: Any,
    op: ReduceOp | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """The gradient is an allgather; for `Sum` times the number of ranks, as in Horovod."""
    return grouped_reducescatter([array], op, name, process_set, prescale_factor, postscale_factor)[
        0
    ]


@face(ops.grouped_reducescatter)
def grouped_reducescatter(
    arrays: Sequence[Any],
    op: ReduceOp | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """The gradient is that of `reducescatter`."""
    comm = runtime.communicator(process_set)
    reduction = Reduction(op, name, prescale_factor, postscale_factor, process_set)

    given = list(map(jax.numpy.asarray, arrays))
    lengths = [array.shape[0] if array.ndim else 0 for array in given]

    def run(given: list[Any]) -> list[Any]:
        own = [rows // comm.size + (comm.rank < rows % comm.size) for rows in lengths]
        shapes = [(rows, *array.shape[1:]) for rows, array in zip(own, given, strict=True)]
        return host_callback(reduction.reducescatter, given, shapes)

    def gather(gradients: list[Any], lengths: list[int]) -> list[Any]:
        gathered = grouped_allgather(gradients, name, process_set, lengths)
        return [reduction.scatter_gradient_factor * gradient for gradient in gathered]

    return differentiable(run, lambda gradients: of_floats(gather, gradients, lengths), given)


def pmean(tree: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Averages a pytree of arrays over the ranks, as `jax.lax.pmean` does over devices.

    Collective: every rank; the trees must have the same structure, shapes and dtypes; blocks.

    Args:
        tree: pytree of arrays, such as the gradients of `jax.grad`, inside or outside `jax.jit`.
        process_set: as in `allreduce`.

    Returns:
        Pytree of the same structure. All leaves are reduced in one operation; those of dtype
        `float0`, the gradients of integers, stay as they are.

    Raises:
        MismatchError: as in `allreduce`.

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
    return _reduce_tree(tree, Average, process_set)


def psum(tree: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Sums a pytree of arrays over the ranks, as `jax.lax.psum` does over devices.

    Collective: as `pmean`.

    Args:
        tree: as in `pmean`.
        process_set: as in `allreduce`.

    Returns:
        Pytree of the same structure.

    Raises:
        MismatchError: as in `allreduce`.
    """
    return _reduce_tree(tree, Sum, process_set)


average_gradients = pmean


def _reduce_tree(tree: Any, op: ReduceOp, process_set: ProcessSet) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    # The gradients of integers, which `jax.grad(allow_int=True)` returns, have no values.
    valued = [i for i, leaf in enumerate(leaves) if _dtype_of(leaf) != jax.dtypes.float0]
    if valued:
        reduced = grouped_allreduce([leaves[i] for i in valued], op, process_set=process_set)
        for i, result in zip(valued, reduced, strict=True):
            leaves[i] = result
    return jax.tree.unflatten(structure, leaves)


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None)
