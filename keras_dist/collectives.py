"""Collectives on values: what a script calls by hand. numpy in, numpy out.

Each takes whatever numpy can make an array of (numbers, lists, arrays, eager tensors on the
CPU) and gives new numpy arrays. Every rank must call the same operations in the same order;
a difference is an error on every rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

ReduceOp = _engine.ReduceOp


def allreduce(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> np.ndarray:
    """Combines the values of all ranks into one, the same bits on every rank.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    Args:
        value: number or array of any shape, of any numeric dtype, bfloat16 included.
            float16 and bfloat16 are summed in float32.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`, or its name. Booleans have
            `Min`, `Max` and `Product`; `Adasum` is for floats, on 1, 2, 4, 8, ... ranks: it
            adds what differs in the values and averages what they have in common. Defaults
            to `Average`.
        name: a name for messages; ranks that pass different names get an error.
        prescale_factor: every rank's value is multiplied by it first. Whole numbers are
            multiplied in float64 and truncated, float16 and bfloat16 in float32. Defaults to
            1.0.
        postscale_factor: the result is multiplied by it, in the same way. Defaults to 1.0.

    Returns:
        New array of the shape and dtype of `value`.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: there is no such `op`, a factor is not finite, or the number of ranks is
            not a power of two for `Adasum`.
        ArgumentTypeError: `op` or a factor is not defined for the dtype.

    Example:
    ```python
    loss = keras_dist.allreduce(loss)
    ```
    """
    return grouped_allreduce([value], op, name, prescale_factor, postscale_factor)[0]


def grouped_allreduce(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[np.ndarray]:
    """Does `allreduce` for a list of values at once: small ones travel together.

    Collective: every rank; shapes, dtypes, `op`, `name` and the factors must agree; blocks.

    Args:
        values: list of numbers or arrays; dtypes may differ within the list.
        op: as for `allreduce`. `Adasum` combines each value by itself.
        name: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: as for `allreduce`.
        ArgumentTypeError: `op` or a factor is not defined for a dtype.
    """
    comm = runtime.communicator()
    arrays = [_as_array(value) for value in values]
    names = _names(name, len(arrays))
    parsed = _engine.parse_op(op, comm.where())
    factors = _factors(prescale_factor, postscale_factor)
    if parsed is ReduceOp.ADASUM:
        return _engine.adasum(comm, arrays, names, name, *factors)
    nbytes = runtime.bucket_nbytes()
    return _engine.allreduce(comm, arrays, names, parsed, nbytes, name, *factors)


def reducescatter(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> np.ndarray:
    """Combines the arrays of all ranks and gives each rank its part of the rows.

    Collective: every rank; shape, dtype, `op`, `name` and the factors must agree; blocks.

    The rows are shared out in rank order. Where they do not divide, the first ranks get one
    more. On one node the bits are those of the same rows of `allreduce`.

    Args:
        value: array with at least one dimension, of any numeric dtype, bfloat16 included.
        op: `Average` or `Sum`, or its name. Defaults to `Average`.
        name: a name for messages; ranks that pass different names get an error.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        New array: this rank's rows of the result; none, where there are more ranks than rows.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar, `op` another one, or a factor not finite.
        ArgumentTypeError: `op` is not defined for the dtype.
    """
    return grouped_reducescatter([value], op, name, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[np.ndarray]:
    """Does `reducescatter` for a list of values at once: they travel together.

    Collective: every rank; shapes, dtypes, `op`, `name` and the factors must agree; blocks.

    Args:
        values: list of arrays; dtypes may differ within the list.
        op: as for `reducescatter`.
        name: as for `reducescatter`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.

    Returns:
        List of new arrays: this rank's rows of each.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: as for `reducescatter`.
        ArgumentTypeError: `op` is not defined for a dtype.
    """
    comm = runtime.communicator()
    arrays = [_as_array(value) for value in values]
    names = _names(name, len(arrays))
    parsed = _engine.parse_op(op, comm.where())
    factors = _factors(prescale_factor, postscale_factor)
    return _engine.reducescatter(comm, arrays, names, parsed, name, *factors)


def allgather(value: Any, name: str | None = None) -> np.ndarray:
    """Joins the arrays of all ranks along their first dimension, in rank order.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        value: array with at least one dimension; its length may differ from rank to rank.
        name: a name for messages; ranks that pass different names get an error.

    Returns:
        New array whose length is the sum of the ranks' lengths.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar.
        ArgumentTypeError: it holds Python objects.
    """
    return _engine.allgather(runtime.communicator(), _as_array(value), name or "value", name)


def grouped_allgather(values: Sequence[Any], name: str | None = None) -> list[np.ndarray]:
    """Does `allgather` for a list of values at once: they travel together.

    Collective: every rank; dtypes, `name` and all dimensions but the first must agree; blocks.

    Args:
        values: list of arrays with at least one dimension; dtypes may differ within the list.
        name: as for `allgather`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: a value is a scalar.
        ArgumentTypeError: one holds Python objects.
    """
    arrays = [_as_array(value) for value in values]
    names = _names(name, len(arrays))
    return _engine.grouped_allgather(runtime.communicator(), arrays, names, name)


def alltoall(
    value: Any, splits: Any = None, name: str | None = None
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Sends some rows of each rank to each rank.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        value: array with at least one dimension; its length may differ from rank to rank. Its
            first rows go to rank 0, the next to rank 1, and so on.
        splits: how many rows each rank gets: one whole number a rank, 0 included. They may
            differ from rank to rank; rows behind their sum are not sent. Defaults to equal
            numbers, for which the length must divide by the number of ranks.
        name: a name for messages; ranks that pass different names get an error.

    Returns:
        New array: the rows from rank 0, then from rank 1, and so on. With `splits` a pair:
        that array, and how many rows came from each rank, int64 of shape (number of ranks,).

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar, or `splits` do not fit it; raised on every rank,
            whichever rank passed them.
        ArgumentTypeError: it holds Python objects; raised on every rank.

    Example:
    ```python
    mine, counts = keras_dist.alltoall(rows, splits=[2, 0, 5, 1])
    ```
    """
    comm = runtime.communicator()
    rows, received = _engine.alltoall(comm, _as_array(value), splits, name or "value", name)
    return rows if splits is None else (rows, received)


def broadcast(value: Any, root_rank: int = 0, name: str | None = None) -> np.ndarray:
    """Returns the root's value on every rank.

    Collective: every rank; shape, dtype, `root_rank` and `name` must agree; blocks.

    Args:
        value: number or array; only the root's values count.
        root_rank: the rank whose value all receive. Defaults to 0.
        name: a name for messages; ranks that pass different names get an error.

    Returns:
        New array.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank.
    """
    comm = runtime.communicator()
    return _engine.broadcast(comm, [_as_array(value)], [name or "value"], root_rank, key=name)[0]


def broadcast_(
    variables: Sequence[np.ndarray], root_rank: int = 0, name: str | None = None
) -> None:
    """Writes the root's values into the arrays of every rank, where they lie.

    Collective: every rank; shapes, dtypes, `root_rank` and `name` must agree; blocks.

    Args:
        variables: list of numpy arrays that can be written to; only the root's values count.
        root_rank: the rank whose values all receive. Defaults to 0.
        name: a name for messages; ranks that pass different names get an error.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank, or an array is read-only.
        ArgumentTypeError: one is not a numpy array of numbers.
    """
    names = _names(name, len(variables))
    for variable, label in zip(variables, names, strict=True):
        _check_writeable(variable, label)
    _engine.broadcast_into(runtime.communicator(), variables, names, root_rank, name)


def barrier() -> None:
    """Waits until every rank has come here. Collective: every rank; blocks."""
    _engine.barrier(runtime.communicator())


def broadcast_object(value: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the root's Python object on every rank. It travels pickled.

    Collective: every rank; `root_rank` and `name` must agree; blocks.

    Args:
        value: any object that can be pickled; only the root's counts.
        root_rank: the rank whose object all receive. Defaults to 0.
        name: a name for messages; ranks that pass different names get an error.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank.
    """
    return _engine.broadcast_object(runtime.communicator(), value, root_rank, name)


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """Returns the Python objects of all ranks, in rank order. They travel pickled.

    Collective: every rank; `name` must agree; blocks.

    Args:
        value: any object that can be pickled.
        name: a name for messages; ranks that pass different names get an error.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
    """
    return _engine.allgather_object(runtime.communicator(), value, name)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise errors.ArgumentError(
            errors.explain(
                runtime.where(),
                "a number or an array of one shape",
                f"{type(value).__name__} ({error})",
                "Pass rows of equal length.",
            )
        ) from error


def _names(name: str | None, count: int) -> list[str]:
    """Returns what the values of a list are called in messages."""
    if count == 1:
        return [name or "value"]
    return [f"{name or 'values'}[{index}]" for index in range(count)]


def _factors(prescale: float, postscale: float) -> tuple[float, float]:
    where = runtime.where()
    return (
        _engine.parse_factor(prescale, "prescale_factor", where),
        _engine.parse_factor(postscale, "postscale_factor", where),
    )


def _check_writeable(variable: Any, name: str) -> None:
    where = runtime.where()
    if not isinstance(variable, np.ndarray) or variable.dtype.hasobject:
        kind = getattr(variable, "dtype", None) or type(variable).__name__
        remedy = "Use keras_dist.broadcast, which returns a new array."
        raise errors.ArgumentTypeError(
            errors.explain(where, f"{name} to be a numpy array of numbers", str(kind), remedy)
        )
    if not variable.flags.writeable:
        expected, received = f"{name} to be writeable", "a read-only array"
        raise errors.ArgumentError(
            errors.explain(where, expected, received, "Pass a copy, and use that.")
        )
