"""Collectives on values: what a script calls by hand. numpy in, numpy out.

Each takes whatever numpy can make an array of (numbers, lists, arrays, eager tensors on the
CPU) and gives new numpy arrays. Every rank must call the same operations in the same order;
a difference is an error on every rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, config, errors, runtime

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "grouped_allreduce",
]

ReduceOp = _engine.ReduceOp


def allreduce(
    value: Any, op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
) -> np.ndarray:
    """Combines the values of all ranks into one, the same bits on every rank.

    Collective: every rank; shape, dtype, `op` and `name` must agree; blocks.

    Args:
        value: number or array of any shape, of any numeric dtype, bfloat16 included.
            float16 and bfloat16 are summed in float32.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`, or its name. Booleans have the
            last three. Defaults to `Average`.
        name: a name for messages; ranks that pass different names get an error.

    Returns:
        New array of the shape and dtype of `value`.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: there is no such `op`.
        ArgumentTypeError: `op` is not defined for the dtype.

    Example:
    ```python
    loss = keras_dist.allreduce(loss)
    ```
    """
    return grouped_allreduce([value], op, name)[0]


def grouped_allreduce(
    values: Sequence[Any], op: ReduceOp | str = ReduceOp.AVERAGE, name: str | None = None
) -> list[np.ndarray]:
    """Does `allreduce` for a list of values at once: small ones travel together.

    Collective: every rank; shapes, dtypes, `op` and `name` must agree; blocks.

    Args:
        values: list of numbers or arrays; dtypes may differ within the list.
        op: as for `allreduce`.
        name: as for `allreduce`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: there is no such `op`.
        ArgumentTypeError: `op` is not defined for a dtype.
    """
    comm = runtime.communicator()
    arrays = [_as_array(value) for value in values]
    names = [name or "value"] if len(arrays) == 1 else _numbered(name or "values", len(arrays))
    parsed = _engine.parse_op(op, comm.where())
    return _engine.allreduce(comm, arrays, names, parsed, config.settings().bucket_nbytes, name)


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
    """
    return _engine.allgather(runtime.communicator(), _as_array(value), name or "value", name)


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


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{index}]" for index in range(count)]
