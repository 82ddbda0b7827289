"""Collectives that run behind the script's back, while it goes on.

Each is queued and returns a `Handle` at once; `synchronize` waits for the result. A thread of
each rank runs what is queued, one after the other. Blocking collectives that are called later,
by the script or within a training step, wait until those before them have run: what counts on
every rank is the order of the calls, blocking or not, and that order must be the same on all
ranks. A difference is an error on every rank.

Operations with a `name` need no order: where ranks differ, one whose name all of them hold comes
first. A rank may hold many by queueing them, or by threads that block. Where they hold no common
name, it is an error on every rank once all Python threads of all ranks, daemon threads too, wait
for operations. As long as one does not, it might call what is missing: the ranks wait, and the
stall watch says so and ends the job after `KERAS_DIST_STALL_ABORT_SECONDS`.

Of one name there is one operation at a time: to ask for another before the first has ended is an
`ArgumentError`, as in Horovod; also on a rank where the first has ended and that waits for the
second.

A value is read when the operation runs, not when it is queued, and it is not copied: it must
not be changed until the handle is done. Results are new arrays. In which order a rank asks for
its results, and whether it does, is its own affair: the operation runs anyway. An error that
nobody asks for is logged. The end of the script and `shutdown` wait for what is queued.

A script that calls MPI itself while operations are queued needs `MPI_THREAD_MULTIPLE`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from keras_dist import _engine, errors, ops, runtime
from keras_dist.ops.descriptions import queued_docstring

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
    "queued",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Handle = _engine.Handle
P = ParamSpec("P")


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


def queued(operation: Callable[P, Any], name: str | None = None) -> Callable[P, Handle]:
    """Returns the form of a collective that queues it.

    Args:
        operation: a blocking collective.
        name: what the form is called. Defaults to the operation's name and `_async`.
    """
    what, signature = operation.__name__, inspect.signature(operation)

    @functools.wraps(operation)
    def queue(*args: P.args, **kwargs: P.kwargs) -> Handle:
        try:
            given = signature.bind(*args, **kwargs).arguments
            comm = runtime.communicator(given.get("process_set"))
        except TypeError:  # which the operation raises, and tells the ranks that wait for this one
            return operation(*args, **kwargs)
        return comm.queue(functools.partial(operation, *args, **kwargs), what, given.get("name"))

    queue.__name__ = queue.__qualname__ = name or f"{what}_async"
    queue.__module__ = __name__
    vars(queue)["__signature__"] = signature.replace(return_annotation=Handle)
    queue.__doc__ = queued_docstring(operation.__name__)
    return queue


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


allreduce_async = queued(ops.allreduce)
grouped_allreduce_async = queued(ops.grouped_allreduce)
reducescatter_async = queued(ops.reducescatter)
grouped_reducescatter_async = queued(ops.grouped_reducescatter)
allgather_async = queued(ops.allgather)
grouped_allgather_async = queued(ops.grouped_allgather)
alltoall_async = queued(ops.alltoall)
sparse_allreduce_async = queued(ops.sparse_allreduce)
broadcast_async = queued(ops.broadcast)
