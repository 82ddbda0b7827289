"""Work that only the root does, or each rank for itself; a failure is raised on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

from keras_dist import _engine, errors, runtime

Value = TypeVar("Value")


def on_root(
    root_rank: int,
    key: str,
    work: Callable[[], Value],
    kind: type[errors.KerasDistError],
    expected: str,
    remedy: str,
) -> Value:
    """Calls a function on the root and returns its result on every rank.

    Collective: every rank; blocks until the root is done.
    """
    cause: Exception | None = None
    outcome: Any = None
    while outcome is None:  # a root that dies sends nothing, and another rank gets its number
        value = failure = None
        if runtime.rank() == root_rank:
            try:
                value = work()
            except Exception as error:  # the other ranks wait for the outcome
                received = f"{type(error).__name__}: {error}"
                explained = errors.explain(runtime.where(), expected, received, remedy)
                cause, failure = error, str(error) if isinstance(error, kind) else explained
            outcome = failure, value
        outcome = _engine.collectives.broadcast_object(
            runtime.fit_communicator(), outcome, root_rank, key
        )
    failure, value = outcome
    if failure is not None:
        raise kind(failure) from cause
    return value


def on_all(work: Callable[[], Value], operation: str) -> list[Value]:
    """Calls a function on every rank and returns the results of all, in rank order.

    Collective: every rank; blocks.
    """
    mine: Any
    cause: Exception | None = None
    try:
        mine = work()
    except errors.KerasDistError as error:
        mine = error
    except Exception as error:  # the other ranks wait
        cause, received = error, f"{type(error).__name__}: {error}"
        expected, remedy = f"{operation} without an error", "Fix the error on this rank."
        text = errors.explain(runtime.where(), expected, received, remedy)
        mine = errors.CheckpointError(text)
    everyone = _engine.collectives.allgather_object(
        runtime.fit_communicator(), mine, operation=operation
    )
    failed = [result for result in everyone if isinstance(result, errors.KerasDistError)]
    if failed:
        raise failed[0] from cause
    return everyone
