"""Errors of arguments, told to the ranks that wait: so all go on with the same next call.

A collective begins with a meeting. A rank that finds its arguments wrong before would leave the
others waiting, and be a call behind if its script goes on.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from keras_dist import _engine, errors, runtime

__all__ = ["raises_on_all"]

P = ParamSpec("P")
R = TypeVar("R")


def raises_on_all(operation: Callable[P, R]) -> Callable[P, R]:
    """Makes a collective tell the other ranks what it raises before it has met them.

    Collective: as the operation; a rank whose arguments are wrong waits for the others. They raise
    its error, and it raises what it would have raised.

    Args:
        operation: a function that takes part in one meeting or more; the arguments `name` and
            `process_set`, where it has them, say where.
    """

    @functools.wraps(operation)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _engine.times_met()
        try:
            return operation(*args, **kwargs)
        except Exception as error:  # what a user passes may raise anything when it is looked at
            if _engine.times_met() == before:
                _tell(operation, error, args, kwargs)
            raise

    return called


def _tell(operation: Callable[..., Any], error: Exception, args: Any, kwargs: Any) -> None:
    given = dict(kwargs)
    with contextlib.suppress(TypeError):  # those do not fit it, which is the error
        given = inspect.signature(operation).bind(*args, **kwargs).arguments
    name = given.get("name")
    with contextlib.suppress(Exception):  # nobody knows to whom: it is not the set of this rank
        comm = _ranks(given.get("process_set"))
        key = name if isinstance(name, str) else None
        _engine.tell_error(comm, operation.__name__, error, key)


def _ranks(process_set: Any) -> _engine.Communicator:
    """Returns the ranks of a process set; all of them where it is none, which is the error."""
    try:
        return runtime.communicator(process_set)
    except errors.ArgumentTypeError:
        return runtime.communicator()
