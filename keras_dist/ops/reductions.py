"""Reductions: one result from the values of all ranks."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.ops.arguments import as_array, check_out, names_of, parse_factors, resolve_op
from keras_dist.ops.gradient_plans import bucket_nbytes
from keras_dist.ops.reduce_op import ReduceOp
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet

_Request = tuple[list[np.ndarray], Sequence[str], _engine.OpOptions]


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
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Reduces a value over all ranks; every rank receives the same bits.

    Collective: every rank; shape, dtype, `op`, `name`, the factors and `compression` must
    agree; blocks.

    Args:
        value: number or array of any shape and numeric dtype, bfloat16 included. float16 and
            bfloat16 are summed in float32.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`, or its name. Booleans take
            `Min`, `Max` and `Product`. `Adasum` takes floats and a power of two of ranks: it
            adds orthogonal values and averages parallel ones. Averages of integers are exact and
            truncated towards zero. Defaults to `Average`.
        name: operation name. Ranks may issue named operations in different orders; operations
            match by name. Defaults to `None`: operations match by their order.
        prescale_factor: factor by which the value of every rank is multiplied before the
            reduction. Integers are multiplied in float64 and truncated, float16 and bfloat16 in
            float32. Defaults to 1.0.
        postscale_factor: factor by which the result is multiplied, in the same precision.
            Defaults to 1.0.
        process_set: `ProcessSet` of the ranks that take part; on other ranks an `ArgumentError`.
            Defaults to all ranks.
        compression: wire format of float32 and float64 between nodes: a member of `Compression`,
            its name or a `Compressor`. Values and result are rounded to it. Not
            applied to `Adasum`, nor up to 32 KiB. Defaults to `KERAS_DIST_COMPRESSION`, which
            defaults to `none`.
        average: deprecated, until 2.0: `True` is `op=Average`, `False` is `op=Sum`.
        out: array of the shape and dtype of `value` that receives the result; may be `value`.
            Ranks may differ in it. Defaults to a new array.

    Returns:
        `out`, or a new array of the shape and dtype of `value`, in native byte order. A JAX
        variable that is assigned the result may alias its memory: do not write to it afterwards.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `op` or `compression` is unknown, a factor is not finite, the number of
            ranks is not a power of two for `Adasum`, both `op` and `average` are given, or `out`
            is read-only or does not fit `value`.
        ArgumentTypeError: `op` or a factor is not defined for the dtype, or `out` is not an array.

    Example:
    ```python
    loss = keras_dist.allreduce(loss)
    ```
    """
    comm = runtime.communicator(process_set)
    if type(value) is np.ndarray:
        array = value
    else:
        with _engine.collectives.raise_on_all(comm, "allreduce", name):
            array = as_array(value)
    key: Any = None
    if name is None and average is None and isinstance(array, np.ndarray):
        key = (array.dtype, array.shape, op, prescale_factor, postscale_factor, compression)
        try:
            run = _short_path(comm, key, array, out)
        except TypeError:  # an argument without a hash
            key = run = None
        if run is not None:
            return run(array, out)
        if not array.dtype.isnative:
            key = None  # the short path takes the array as it is
    with _engine.collectives.raise_on_all(comm, "allreduce", name):
        resolved = resolve_op(op, average)
        if out is not None:
            check_out(out, array)
    request = _parse(comm, [array], resolved, name, prescale_factor, postscale_factor, compression)
    [result] = _reduce(comm, *request, key)
    if out is None:
        return result
    np.copyto(out, result)
    return out


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
    """Reduces a list of values over all ranks, as `allreduce`; small values share a buffer.

    Collective: every rank; shapes, dtypes, `op`, `name`, the factors and `compression` must
    agree; blocks.

    Args:
        values: list of numbers or arrays; dtypes may differ within the list.
        op: as in `allreduce`. `Adasum` combines each value separately.
        name: as in `allreduce`.
        prescale_factor: as in `allreduce`.
        postscale_factor: as in `allreduce`.
        process_set: as in `allreduce`.
        compression: as in `allreduce`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: as in `allreduce`.
        ArgumentTypeError: `op` or a factor is not defined for a dtype.
    """
    comm = runtime.communicator(process_set)
    key = None
    if name is None:
        key = _list_key(values, (op, prescale_factor, postscale_factor, compression))
        run = None if key is None else comm.fast_calls.get(key)
        if run is not None:
            return run(values)
        if key is not None and not all(value.dtype.isnative for value in values):
            key = None
    request = _parse(comm, values, op, name, prescale_factor, postscale_factor, compression)
    return _reduce(comm, *request, key)


def _parse(
    comm: _engine.Communicator,
    values: Sequence[Any],
    op: ReduceOp | str,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: _engine.Compressor | str | None,
) -> _Request:
    """Returns the checked arguments of `grouped_allreduce`; raises errors on all ranks."""
    with _engine.collectives.raise_on_all(comm, "allreduce", name):
        arrays = [as_array(value) for value in values]
        parsed = _engine.parse_op(op, comm.where())
        factors = parse_factors(prescale_factor, postscale_factor)
        compressor = _engine.parse_compression(compression, comm.where())
    options = _engine.OpOptions(parsed, name, *factors, compressor)
    return arrays, names_of(name, len(arrays)), options


def _reduce(
    comm: _engine.Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    options: _engine.OpOptions,
    key: Any,
) -> list[np.ndarray]:
    """Reduces arrays; `key` is that of calls like this one, `None` for none."""
    if options.op is ReduceOp.ADASUM:
        return _engine.collectives.adasum(comm, arrays, names, options)
    return _engine.collectives.allreduce(comm, arrays, names, options, bucket_nbytes(), key)


def _short_path(
    comm: _engine.Communicator, key: Any, array: np.ndarray, out: np.ndarray | None
) -> Any:
    """Returns the short path of a call like an earlier one; `None`: the ordinary way checks it."""
    run = comm.fast_calls.get(key)
    if out is None or run is None:
        return run
    fits = type(out) is np.ndarray and out.shape == array.shape and out.dtype == array.dtype
    return run if fits and out.flags.writeable else None


def _list_key(values: Sequence[Any], options: tuple[Any, ...]) -> Any:
    """Returns the key of a call with a list; `None` if it has no short path."""
    is_list = isinstance(values, list | tuple) and len(values) > 1
    if not is_list or set(map(type, values)) != {np.ndarray}:
        return None
    with contextlib.suppress(TypeError):  # an argument without a hash
        return _engine.collectives.ListKey(values, options)
    return None


@raises_on_all
def reducescatter(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Reduces an array over all ranks and scatters the rows of the result.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    Rows are distributed in rank order. Where the number of rows is not divisible by the number of
    ranks, the first ranks get one row more.

    Args:
        value: array with at least one dimension, of any numeric dtype, bfloat16 included.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        name: as in `allreduce`.
        prescale_factor: as in `allreduce`.
        postscale_factor: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        New array: the rows of this rank; empty if there are more ranks than rows. On one node
        the bits are those of the same rows of `allreduce`.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar, `op` is another reduction, or a factor is not finite.
        ArgumentTypeError: `op` is not defined for the dtype.
    """
    return grouped_reducescatter([value], op, name, prescale_factor, postscale_factor, process_set)[
        0
    ]


@raises_on_all
def grouped_reducescatter(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[np.ndarray]:
    """Reduces and scatters a list of arrays, as `reducescatter`, in one message.

    Collective: every rank; shapes, dtypes, `op`, `name` and the factors must agree; blocks.

    Args:
        values: list of arrays with at least one dimension; dtypes may differ within the list.
        op: as in `reducescatter`.
        name: as in `allreduce`.
        prescale_factor: as in `allreduce`.
        postscale_factor: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        List of new arrays: the rows of this rank.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: as in `reducescatter`.
        ArgumentTypeError: `op` is not defined for a dtype.
    """
    comm = runtime.communicator(process_set)
    with _engine.collectives.raise_on_all(comm, "reducescatter", name):
        arrays = [as_array(value) for value in values]
        parsed = _engine.parse_op(op, comm.where())
        factors = parse_factors(prescale_factor, postscale_factor)
    names = names_of(name, len(arrays))
    options = _engine.OpOptions(parsed, name, *factors)
    return _engine.collectives.reducescatter(comm, arrays, names, options)


@raises_on_all
def sparse_allreduce(
    values: Any,
    indices: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Reduces rows of a table over all ranks, such as the gradient of an embedding.

    Collective: every rank; dtypes, `op`, `name` and all dimensions of `values` but the first
    must agree; blocks.

    Rows of equal index are added up, within a rank and over ranks, in rank order: every rank
    receives the same bits.

    Args:
        values: array of rows, of any numeric dtype, bfloat16 included; the number of rows may
            differ from rank to rank.
        indices: integers of shape (number of rows,): the row of the table of each. An index may
            occur several times.
        op: `Average` or `Sum`, or its name. An average divides by the number of ranks, as that
            of the dense table does, not by the number of ranks that have the row. Defaults to
            `Average`.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        Pair of new arrays: the rows, and their unique indices in ascending order.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `values` is a scalar, `indices` is of another length, or `op` is another
            reduction; raised on every rank, whichever rank passed it.
        ArgumentTypeError: `indices` are not integers, or `op` is not defined for the dtype;
            raised on every rank, whichever rank passed it.

    Example:
    ```python
    rows, indices = keras_dist.sparse_allreduce(rows, indices)
    table[indices] -= rate * rows
    ```
    """
    comm = runtime.communicator(process_set)
    with _engine.collectives.raise_on_all(comm, "sparse_allreduce", name):
        parsed = _engine.parse_op(op, comm.where())
        rows, row_indices = as_array(values), as_array(indices)
    options = _engine.OpOptions(parsed, name)
    return _engine.collectives.reduce_slices(comm, rows, row_indices, name or "values", options)
