"""Values that go from rank to rank as they are, and the wait for all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.ops.values import as_array, check_writeable, names_of
from keras_dist.runtime.process_sets import ProcessSet

__all__ = [
    "allgather",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
]


@raises_on_all
def allgather(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Joins the arrays of all ranks along their first dimension, in rank order.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        value: array with at least one dimension; its length may differ from rank to rank.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.

    Returns:
        New array whose length is the sum of the ranks' lengths.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar.
        ArgumentTypeError: it holds Python objects.
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "allgather", name):
        array = as_array(value)
    return _engine.allgather(comm, array, name or "value", name)


@raises_on_all
def grouped_allgather(
    values: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[np.ndarray]:
    """Does `allgather` for a list of values at once: they travel together.

    Collective: every rank; dtypes, `name` and all dimensions but the first must agree; blocks.

    Args:
        values: list of arrays with at least one dimension; dtypes may differ within the list.
        name: as for `allgather`.
        process_set: as for `allgather`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: a value is a scalar.
        ArgumentTypeError: one holds Python objects.
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "allgather", name):
        arrays = [as_array(value) for value in values]
    return _engine.grouped_allgather(comm, arrays, names_of(name, len(arrays)), name)


@raises_on_all
def alltoall(
    value: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Sends some rows of each rank to each rank.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        value: array with at least one dimension; its length may differ from rank to rank. Its
            first rows go to rank 0, the next to rank 1, and so on.
        splits: how many rows each rank gets: one whole number a rank, 0 included. They may
            differ from rank to rank; rows behind their sum are not sent. Defaults to equal
            numbers, for which the length must divide by the number of ranks.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.

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
    mine, counts = keras_dist.alltoall(rows, splits=[2, 5])  # two ranks
    ```
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "alltoall", name):
        array = as_array(value)
    rows, received = _engine.alltoall(comm, array, splits, name or "value", name)
    return rows if splits is None else (rows, received)


@raises_on_all
def broadcast(
    value: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Returns the root's value on every rank.

    Collective: every rank; shape, dtype, `root_rank` and `name` must agree; blocks.

    Args:
        value: number or array; only the root's values count.
        root_rank: the rank whose value all receive, by its number in the job, also in a
            process set. Defaults to 0.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.

    Returns:
        New array.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not one of the ranks.
        ArgumentTypeError: `value` holds Python objects.
    """
    comm = runtime.communicator(process_set)
    with _engine.telling(comm, "broadcast", name):
        array = as_array(value)
    return _engine.broadcast(comm, [array], [name or "value"], root_rank, key=name)[0]


@raises_on_all
def broadcast_(
    variables: Sequence[np.ndarray],
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Writes the root's values into the arrays of every rank, where they lie.

    Collective: every rank; shapes, dtypes, `root_rank` and `name` must agree; blocks.

    Args:
        variables: list of numpy arrays that can be written to; only the root's values count.
        root_rank: the rank whose values all receive, by its number in the job, also in a
            process set. Defaults to 0.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.

    Raises:
        MismatchError: the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not one of the ranks, or an array is read-only.
        ArgumentTypeError: one is not a numpy array of numbers.
    """
    comm, names = runtime.communicator(process_set), names_of(name, len(variables))
    with _engine.telling(comm, "broadcast_", name):
        for variable, label in zip(variables, names, strict=True):
            check_writeable(variable, label)
    _engine.broadcast_into(comm, variables, names, root_rank, name)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Waits until every rank has come here. Collective: every rank; blocks.

    Args:
        process_set: the ranks that take part, a `ProcessSet` or `None` for all; any other gets
            an `ArgumentError`. Defaults to `None`.
    """
    _engine.barrier(runtime.communicator(process_set))
