"""Reductions of values: one result from the contributions of all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.ops.arguments import chosen_op
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.ops.reduce_op import ReduceOp
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.ops.values import as_array, names_of, parse_factors
from keras_dist.runtime.process_sets import ProcessSet

__all__ = [
    "allreduce",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
    "sparse_allreduce",
]


@raises_on_all
def allreduce(
    value: Any,
    op: ReduceOp | str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | str | None = None,
    average: bool | None = None,
) -> np.ndarray:
    """Combines the values of all ranks into one, the same bits on every rank.

    Collective: every rank; shape, dtype, `op`, `name`, the factors and `compression` must
    agree; blocks.

    Args:
        value: number or array of any shape, of any numeric dtype, bfloat16 included.
            float16 and bfloat16 are summed in float32.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`, or its name. Booleans have
            `Min`, `Max` and `Product`; `Adasum` is for floats, on 1, 2, 4, 8, ... ranks: it
            adds what differs in the values and averages what they have in common. Averages of
            whole numbers are exact and truncated towards zero. Defaults to `Average`.
        name: a name, by which calls that ranks make in different orders find each other.
        prescale_factor: every rank's value is multiplied by it first. Whole numbers are
            multiplied in float64 and truncated, float16 and bfloat16 in float32. Defaults to
            1.0.
        postscale_factor: the result is multiplied by it, in the same way. Defaults to 1.0.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.
        compression: what float32 and float64 look like between nodes, of `Compression`, its
            name or a `Compressor` of your own; not for `Adasum`, nor up to 32 KiB. Contributions
            are rounded to it before they are combined, and so is the result. Defaults to
            `KERAS_DIST_COMPRESSION`, that is `none`.
        average: deprecated: `True` is `op=Average`, `False` is `op=Sum`.

    Returns:
        New array of the shape and dtype of `value`. A variable of JAX that is assigned it may take
        it without a copy: do not write to it then.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: there is no such `op` or `compression`, a factor is not finite, or the
            number of ranks is not a power of two for `Adasum`; both `op` and `average` are given.
        ArgumentTypeError: `op` or a factor is not defined for the dtype.

    Example:
    ```python
    loss = keras_dist.allreduce(loss)
    ```
    """
    with _engine.telling(runtime.communicator(process_set), "allreduce", name):
        chosen = chosen_op(op, average)
    factors = prescale_factor, postscale_factor
    return grouped_allreduce([value], chosen, name, *factors, process_set, compression)[0]


@raises_on_all
def grouped_allreduce(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | str | None = None,
) -> list[np.ndarray]:
    """Does `allreduce` for a list of values at once: small ones travel together.

    Collective: every rank; shapes, dtypes, `op`, `name`, the factors and `compression` must
    agree; blocks.

    Args:
        values: list of numbers or arrays; dtypes may differ within the list.
        op: as for `allreduce`. `Adasum` combines each value by itself.
        name: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`.
        compression: as for `allreduce`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: as for `allreduce`.
        ArgumentTypeError: `op` or a factor is not defined for a dtype.
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "allreduce", name):
        arrays = [as_array(value) for value in values]
        parsed = _engine.parse_op(op, comm.where())
        factors = parse_factors(prescale_factor, postscale_factor)
        compressor = _engine.parse_compression(compression, comm.where())
    names = names_of(name, len(arrays))
    if parsed is ReduceOp.ADASUM:
        return _engine.adasum(comm, arrays, names, name, *factors)
    nbytes = bucket_nbytes(comm)
    return _engine.allreduce(comm, arrays, names, parsed, nbytes, name, *factors, compressor)


@raises_on_all
def reducescatter(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Combines the arrays of all ranks and gives each rank its part of the rows.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    The rows are shared out in rank order. Where they do not divide, the first ranks get one
    more. On one node the bits are those of the same rows of `allreduce`.

    Args:
        value: array with at least one dimension, of any numeric dtype, bfloat16 included.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        name: a name, by which calls that ranks make in different orders find each other.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`.

    Returns:
        New array: this rank's rows of the result; none, where there are more ranks than rows.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar, `op` another one, or a factor not finite.
        ArgumentTypeError: `op` is not defined for the dtype.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([value], op, name, *factors, process_set)[0]


@raises_on_all
def grouped_reducescatter(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[np.ndarray]:
    """Does `reducescatter` for a list of values at once: they travel together.

    Collective: every rank; shapes, dtypes, `op`, `name` and the factors must agree; blocks.

    Args:
        values: list of arrays; dtypes may differ within the list.
        op: as for `reducescatter`.
        name: as for `reducescatter`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`.

    Returns:
        List of new arrays: this rank's rows of each.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: as for `reducescatter`.
        ArgumentTypeError: `op` is not defined for a dtype.
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "reducescatter", name):
        arrays = [as_array(value) for value in values]
        parsed = _engine.parse_op(op, comm.where())
        factors = parse_factors(prescale_factor, postscale_factor)
    names = names_of(name, len(arrays))
    return _engine.reducescatter(comm, arrays, names, parsed, name, *factors)


@raises_on_all
def sparse_allreduce(
    values: Any,
    indices: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Combines rows of a table, of which each rank holds a few, as an embedding's gradient.

    Collective: every rank; dtypes, `op`, `name` and all dimensions of `values` but the first
    must agree; blocks.

    Rows of equal index are added up, those of one rank and those of several, in rank order: the
    bits are the same on every rank.

    Args:
        values: array of rows, of any numeric dtype, bfloat16 included; their number may differ
            from rank to rank.
        indices: whole numbers, shape (number of rows,): which row of the table each is. An
            index may occur several times.
        op: `Average` or `Sum`, or its name. An average divides by the number of ranks, as that
            of the whole table does, not by the number of ranks that hold the row. Defaults to
            `Average`.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: as for `allreduce`. Defaults to `None`.

    Returns:
        Pair of new arrays: the rows, and their indices in ascending order, each once.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `values` is a scalar, `indices` do not fit it, or `op` is another one;
            raised on every rank, whichever rank passed it.
        ArgumentTypeError: `indices` are no whole numbers, or `op` is not defined for the dtype;
            raised on every rank, whichever rank passed it.

    Example:
    ```python
    rows, places = keras_dist.sparse_allreduce(rows, places)
    table[places] -= rate * rows
    ```
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "sparse_allreduce", name):
        parsed = _engine.parse_op(op, comm.where())
        rows, places = as_array(values), as_array(indices)
    return _engine.reduce_slices(comm, rows, places, parsed, name or "values", name)
