"""Collectives that run behind the script's back, while it goes on.

Each is queued and returns a `Handle` at once; `synchronize` waits for the result. A thread of
each rank runs what is queued, one after the other. Blocking collectives that are called later,
by the script or within a training step, wait until those before them have run: what counts on
every rank is the order of the calls, blocking or not, and that order must be the same on all
ranks. A difference is an error on every rank.

A value is read when the operation runs, not when it is queued, and it is not copied: it must
not be changed until the handle is done. Results are new arrays. In which order a rank asks for
its results, and whether it does, is its own affair: the operation runs anyway. An error that
nobody asks for is logged. The end of the script and `shutdown` wait for what is queued.

A script that calls MPI itself while operations are queued needs `MPI_THREAD_MULTIPLE`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist import _engine, collectives, errors, runtime
from keras_dist.process_sets import ProcessSet

__all__ = [
    "Handle",
    "allgather_async",
    "allreduce_async",
    "alltoall_async",
    "broadcast_async",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Handle = _engine.Handle
ReduceOp = _engine.ReduceOp


def poll(handle: Handle) -> bool:
    """Tells whether a queued operation has ended, well or not. Does not block.

    Args:
        handle: what the operation returned when it was queued.

    Raises:
        ArgumentTypeError: it is no handle.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Waits for a queued operation. Blocks; other ranks may ask in another order, or not at all.

    Args:
        handle: what the operation returned when it was queued.

    Returns:
        What the blocking operation returns.

    Raises:
        ArgumentTypeError: it is no handle.
        KerasDistError: what the blocking operation raises, at every call.

    Example:
    ```python
    handle = keras_dist.allreduce_async(statistics)
    batch = prepare()
    statistics = keras_dist.synchronize(handle)
    ```
    """
    return _checked(handle).wait()


def allreduce_async(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | str | None = None,
) -> Handle:
    """Queues `allreduce`.

    Collective: every rank, in the same order; does not block.

    Args:
        value: as for `allreduce`; it must not be changed until the handle is done.
        op: as for `allreduce`.
        name: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.
        compression: as for `allreduce`.

    Returns:
        The handle; `synchronize` gives what `allreduce` returns, or raises its error.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _queue(
        process_set, collectives.allreduce, value, op, name, **factors, compression=compression
    )


def grouped_allreduce_async(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: _engine.Compressor | str | None = None,
) -> Handle:
    """Queues `grouped_allreduce`.

    Collective: every rank, in the same order; does not block.

    Args:
        values: as for `grouped_allreduce`; neither the list nor what is in it may be changed
            until the handle is done.
        op: as for `allreduce`.
        name: as for `allreduce`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.
        compression: as for `allreduce`.

    Returns:
        The handle; `synchronize` gives what `grouped_allreduce` returns, or raises its error.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    call = collectives.grouped_allreduce
    return _queue(process_set, call, values, op, name, **factors, compression=compression)


def reducescatter_async(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Queues `reducescatter`.

    Collective: every rank, in the same order; does not block.

    Args:
        value: as for `reducescatter`; it must not be changed until the handle is done.
        op: as for `reducescatter`.
        name: as for `reducescatter`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `reducescatter` returns, or raises its error.
    """
    return _queue(
        process_set, collectives.reducescatter, value, op, name, prescale_factor, postscale_factor
    )


def grouped_reducescatter_async(
    values: Sequence[Any],
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Queues `grouped_reducescatter`.

    Collective: every rank, in the same order; does not block.

    Args:
        values: as for `grouped_reducescatter`; neither the list nor what is in it may be
            changed until the handle is done.
        op: as for `reducescatter`.
        name: as for `reducescatter`.
        prescale_factor: as for `allreduce`.
        postscale_factor: as for `allreduce`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `grouped_reducescatter` returns, or raises its
        error.
    """
    return _queue(
        process_set,
        collectives.grouped_reducescatter,
        values,
        op,
        name,
        prescale_factor,
        postscale_factor,
    )


def allgather_async(
    value: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Queues `allgather`.

    Collective: every rank, in the same order; does not block.

    Args:
        value: as for `allgather`; it must not be changed until the handle is done.
        name: as for `allgather`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `allgather` returns, or raises its error.
    """
    return _queue(process_set, collectives.allgather, value, name)


def grouped_allgather_async(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Queues `grouped_allgather`.

    Collective: every rank, in the same order; does not block.

    Args:
        values: as for `grouped_allgather`; neither the list nor what is in it may be changed
            until the handle is done.
        name: as for `allgather`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `grouped_allgather` returns, or raises its error.
    """
    return _queue(process_set, collectives.grouped_allgather, values, name)


def alltoall_async(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Queues `alltoall`.

    Collective: every rank, in the same order; does not block.

    Args:
        value: as for `alltoall`; it must not be changed until the handle is done.
        splits: as for `alltoall`; they must not be changed either.
        name: as for `alltoall`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `alltoall` returns, or raises its error.
    """
    return _queue(process_set, collectives.alltoall, value, splits, name)


def sparse_allreduce_async(
    values: Any,
    indices: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Queues `sparse_allreduce`.

    Collective: every rank, in the same order; does not block.

    Args:
        values: as for `sparse_allreduce`; they must not be changed until the handle is done.
        indices: as for `sparse_allreduce`; they must not be changed either.
        op: as for `sparse_allreduce`.
        name: as for `sparse_allreduce`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `sparse_allreduce` returns, or raises its error.
    """
    return _queue(process_set, collectives.sparse_allreduce, values, indices, op, name)


def broadcast_async(
    value: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Queues `broadcast`.

    Collective: every rank, in the same order; does not block.

    Args:
        value: as for `broadcast`; it must not be changed until the handle is done.
        root_rank: as for `broadcast`.
        name: as for `broadcast`.
        process_set: as for `allreduce`; the order is that of the calls on the set. Defaults to
            `None`.

    Returns:
        The handle; `synchronize` gives what `broadcast` returns, or raises its error.
    """
    return _queue(process_set, collectives.broadcast, value, root_rank, name)


def _queue(
    process_set: ProcessSet | None, operation: Callable[..., Any], *arguments: Any, **options: Any
) -> Handle:
    work = functools.partial(operation, *arguments, process_set=process_set, **options)
    return runtime.communicator(process_set).queue(work, operation.__name__)


def _checked(handle: Any) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise errors.ArgumentTypeError(
        errors.explain(
            runtime.where(),
            "a handle, as keras_dist.allreduce_async returns",
            type(handle).__name__,
            "Results of blocking operations need no synchronize.",
        )
    )
