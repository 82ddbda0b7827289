"""What the root does alone, and how the other ranks hear of its failure."""

from collections.abc import Callable
from typing import Any, TypeVar

from keras_dist import _engine, errors, runtime

__all__ = ["on_root"]

Value = TypeVar("Value")


def on_root(
    root_rank: int,
    key: str,
    work: Callable[[], Value],
    kind: type[errors.KerasDistError],
    expected: str,
    remedy: str,
) -> Value:
    """Does something on the root, and returns on every rank what came of it.

    Collective: every rank; blocks until the root is done.

    Args:
        root_rank: the rank that works.
        key: a name under which the ranks must meet.
        work: what it does; what it returns travels as an object.
        kind: the error to raise where it fails; one of that kind which the work raises is passed
            on with its own words.
        expected: what it is to do; the text of the root counts, here and below.
        remedy: what the user should do when it fails.

    Raises:
        KerasDistError: the work failed; of that kind, raised on every rank.
    """
    cause: Exception | None = None
    told: Any = None
    while told is None:  # a root that dies tells nothing, and the next rank has its number
        value = failure = None
        if runtime.rank() == root_rank:
            try:
                value = work()
            except Exception as error:  # whatever it is, the others are waiting to hear of it
                received = f"{type(error).__name__}: {error}"
                explained = errors.explain(runtime.where(), expected, received, remedy)
                cause, failure = error, str(error) if isinstance(error, kind) else explained
            told = failure, value
        told = _engine.broadcast_object(runtime.communicator(), told, root_rank, key)
    failure, value = told
    if failure is not None:
        raise kind(failure) from cause
    return value
