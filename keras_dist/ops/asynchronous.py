"""Queued collectives, which run while the script continues.

Each function queues its operation and returns a `Handle`; `synchronize` waits for the result. A
background thread of each rank runs queued operations one after the other. A blocking collective
that is called later, by the script or within a training step, waits until the operations before it
have run: operations match in the order of the calls, blocking or queued, and that order must be the
same on all ranks. A mismatch is an error on every rank.

Operations with a `name` may come in any order, also relative to those without: where ranks differ,
the operation without a name runs first if it is pending on all ranks, otherwise one whose name is.
A rank may have many pending names, by queueing them or from several threads. Where the ranks have
none in common, it is an error on every rank once all Python threads of all ranks, daemon threads
included, wait for operations: it ends all waits and all operations in flight. While a thread does
not wait, it may still call the missing operation: the ranks wait, and the stall watchdog reports it
and ends the job after `KERAS_DIST_STALL_ABORT_SECONDS`.

A name is in use until its operation has completed on every rank: queueing the name again before is
an `ArgumentError`, as in Horovod, also on a rank where the first operation has completed and that
waits for the second.

A value is read when the operation runs, not when it is queued, and it is not copied: do not change
it until the handle is done. Results are new arrays. A rank may synchronize in any order or not at
all: the operation runs regardless. An error that no `synchronize` raises is logged. The end of the
script and `shutdown` wait for queued operations.

A script that calls MPI itself while operations are queued needs `MPI_THREAD_MULTIPLE`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from keras_dist import _engine, errors, ops, runtime
from keras_dist.ops.descriptions import queued_docstring
from keras_dist.ops.shared_errors import publish

Handle = _engine.Handle
P = ParamSpec("P")


def poll(handle: Handle) -> bool:
    """Returns whether a queued operation has completed or failed. Does not block.

    Args:
        handle: `Handle` of the operation.

    Raises:
        ArgumentTypeError: `handle` is not a `Handle`.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Waits for a queued operation and returns its result. Blocks.

    Not collective: ranks may synchronize in any order, or not at all.

    Args:
        handle: `Handle` of the operation.

    Returns:
        What the blocking operation returns.

    Raises:
        ArgumentTypeError: `handle` is not a `Handle`.
        KerasDistError: the error of the operation, at every call.

    Example:
    ```python
    handle = keras_dist.allreduce_async(statistics)
    batch = prepare()
    statistics = keras_dist.synchronize(handle)
    ```
    """
    return _checked(handle).wait()


def queued(
    operation: Callable[P, Any], name: str | None = None, **fixed: Any
) -> Callable[P, Handle]:
    """Returns the queued form of a collective, which does not take the `fixed` arguments."""
    what, signature = operation.__name__, inspect.signature(operation)
    kept = [each for key, each in signature.parameters.items() if key not in fixed]
    signature = signature.replace(parameters=kept, return_annotation=Handle)

    @functools.wraps(operation)
    def queue(*args: P.args, **kwargs: P.kwargs) -> Handle:
        try:
            given = signature.bind(*args, **kwargs).arguments
            comm = runtime.communicator(given.get("process_set"))
        except TypeError as error:
            publish(what, queue, error, args, kwargs)
            raise
        work = functools.partial(operation, **given, **fixed)
        return comm.order.queue(work, what, given.get("name"))

    queue.__name__ = queue.__qualname__ = name or f"{what}_async"
    queue.__module__ = __name__
    vars(queue)["__signature__"] = signature
    queue.__doc__ = queued_docstring(what)
    return queue


def _checked(handle: Any) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise errors.ArgumentTypeError(
        runtime.where(),
        "a handle, as keras_dist.allreduce_async returns",
        type(handle).__name__,
        "Results of blocking operations need no synchronize.",
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
