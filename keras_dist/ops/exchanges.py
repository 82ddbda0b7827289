"""Operations that pass values between ranks unchanged, the barrier and `join`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.ops.arguments import as_array, check_writeable, names_of, native
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet


@raises_on_all
def allgather(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Concatenates the arrays of all ranks along the first dimension, in rank order.

    For rows that belong to the samples of a shard, `gather` restores the order of the data set.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        value: array with at least one dimension; its length may differ from rank to rank.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        New array whose length is the sum of the lengths on all ranks.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar.
        ArgumentTypeError: `value` holds Python objects.
    """
    comm = runtime.communicator(process_set)
    with _engine.collectives.raise_on_all(comm, "allgather", name):
        array = as_array(value)
    return _engine.collectives.allgather(comm, array, name or "value", name)


@raises_on_all
def grouped_allgather(
    values: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[np.ndarray]:
    """Gathers a list of arrays from all ranks, as `allgather`, in one message.

    Collective: every rank; dtypes, `name` and all dimensions but the first must agree; blocks.

    Args:
        values: list of arrays with at least one dimension; dtypes may differ within the list.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        List of new arrays.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: a value is a scalar.
        ArgumentTypeError: a value holds Python objects.
    """
    comm = runtime.communicator(process_set)
    with _engine.collectives.raise_on_all(comm, "allgather", name):
        arrays = [as_array(value) for value in values]
    return _engine.collectives.grouped_allgather(comm, arrays, names_of(name, len(arrays)), name)


@raises_on_all
def alltoall(
    value: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Sends rows of the array of each rank to every rank.

    Collective: every rank; dtype, `name` and all dimensions but the first must agree; blocks.

    Args:
        value: array with at least one dimension; its length may differ from rank to rank. Its
            first rows go to rank 0, the next to rank 1, and so on.
        splits: number of rows for each rank, integers of shape (number of ranks,), 0 included. They
            may differ from rank to rank; rows beyond their sum are not sent. Defaults to equal
            numbers, for which the length must be divisible by the number of ranks.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        New array: the rows from rank 0, then from rank 1, and so on. With `splits` a pair: that
        array, and the number of rows from each rank, int64 of shape (number of ranks,).

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `value` is a scalar, or `splits` does not fit it; raised on every rank,
            whichever rank passed it.
        ArgumentTypeError: `value` holds Python objects; raised on every rank.

    Example:
    ```python
    mine, counts = keras_dist.alltoall(rows, splits=[2, 5])  # two ranks
    ```
    """
    comm = runtime.communicator(process_set)
    with _engine.collectives.raise_on_all(comm, "alltoall", name):
        array = as_array(value)
    rows, received = _engine.collectives.alltoall(comm, array, splits, name or "value", name)
    return rows if splits is None else (rows, received)


@raises_on_all
def broadcast(
    value: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Returns the value of the root rank on every rank.

    Collective: every rank; shape, dtype, `root_rank` and `name` must agree; blocks.

    Args:
        value: number or array; its values are ignored on ranks other than the root.
        root_rank: rank of the job that sends its value, also in a process set. Defaults to 0.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        New array.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank of the process set.
        ArgumentTypeError: `value` holds Python objects.
    """
    comm = runtime.communicator(process_set)
    with _engine.collectives.raise_on_all(comm, "broadcast", name):
        array = as_array(value)
    return _engine.collectives.broadcast(comm, [array], [name or "value"], root_rank, key=name)[0]


@raises_on_all
def broadcast_(
    variables: Sequence[np.ndarray],
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Writes the values of the root rank into arrays of every rank, in place.

    Collective: every rank; shapes, dtypes, `root_rank` and `name` must agree; blocks.

    Args:
        variables: list of writeable numpy arrays.
        root_rank: rank of the job that sends its values, also in a process set. Defaults to 0.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank of the process set, or an array is read-only.
        ArgumentTypeError: a variable is not a numpy array of numbers.
    """
    comm, names = runtime.communicator(process_set), names_of(name, len(variables))
    with _engine.collectives.raise_on_all(comm, "broadcast_", name):
        for variable, label in zip(variables, names, strict=True):
            check_writeable(variable, label)
    _engine.collectives.broadcast_into(comm, variables, names, root_rank, name)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Blocks until every rank has called it.

    Collective: every rank; blocks.

    Args:
        process_set: as in `allreduce`.
    """
    _engine.collectives.barrier(runtime.communicator(process_set))


def join() -> int:
    """Takes part in the reductions of the other ranks until all ranks have joined.

    Collective: every rank; blocks.

    A rank calls it when it has run out of data. Meanwhile `allreduce`, `grouped_allreduce` and
    `sparse_allreduce` of the other ranks, and the gradients of a `DistributedOptimizer`, continue,
    on process sets as well: a joined rank contributes nothing, and an average is that over the
    ranks that have not joined. (In Horovod an average still divides by the number of all ranks.)
    `Adasum` and all other collectives are an error on every rank.

    A joined rank does not take the steps of the other ranks: broadcast weights and optimizer
    state afterwards, from the rank that is returned. `fit` with `keras_dist.callbacks()` does this
    automatically.

    Returns:
        The last rank to join, equal on all ranks; the highest of those that joined after the same
        operation.

    Raises:
        MismatchError: other ranks call an operation that has no meaning without this rank; raised
            on every rank. Process sets that exist cannot be used afterwards.

    Example:
    ```python
    for batch in batches:  # more on some ranks than on others
        train_step(batch)
    last = keras_dist.join()
    for variable in model.variables + optimizer.variables:
        variable.assign(keras_dist.broadcast(variable, last))
    ```
    """
    comm = runtime.communicator()
    absence = _engine.collectives.join_all(runtime.communicators())[comm]
    return comm.size - 1 if absence is None else absence.here[-1]


@raises_on_all
def broadcast_object(
    value: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns the Python object of the root rank on every rank. Objects are sent pickled.

    Collective: every rank; `root_rank` and `name` must agree; blocks.

    Args:
        value: any object that can be pickled; ignored on ranks other than the root. Defaults to
            `None`.
        root_rank: rank of the job that sends its object, also in a process set. Defaults to 0.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        The root's own object on the root, a copy on the other ranks. The byte order of an array is
        that of this machine.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank of the process set, or its object cannot be
            pickled; raised on every rank.
    """
    if isinstance(value, np.ndarray):
        value = native(value)  # as numpy reads it on the other ranks
    return _engine.collectives.broadcast_object(
        runtime.communicator(process_set), value, root_rank, name
    )


@raises_on_all
def allgather_object(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Returns the Python objects of all ranks, in rank order. Objects are sent pickled.

    Collective: every rank; `name` must agree; blocks.

    Args:
        value: any object that can be pickled.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        List of one object a rank.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: the object of a rank cannot be pickled; raised on every rank.
    """
    return _engine.collectives.allgather_object(runtime.communicator(process_set), value, name)
