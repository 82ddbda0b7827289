"""Argument errors of one rank, raised on all ranks, so that the job can continue in step.

A collective begins with a rendezvous. A rank that rejects its arguments before it would leave the
other ranks waiting, and would be one operation behind if its script continued.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from keras_dist import _engine, errors, runtime

P = ParamSpec("P")
R = TypeVar("R")


def raises_on_all(operation: Callable[P, R]) -> Callable[P, R]:
    """Makes a collective publish the errors that it raises before its rendezvous.

    Collective: as the operation. A rank whose arguments are invalid waits for the other ranks;
    they raise its error, and it raises the original exception.
    """
    count = _engine.collectives.rendezvous_count

    @functools.wraps(operation)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = count()
        try:
            return operation(*args, **kwargs)
        except Exception as error:  # conversion of a value may raise any error
            # An error of another operation, which all ranks know, may end the wait for this one.
            is_shared = isinstance(error, errors.KerasDistError) and error.is_shared
            if count() == before and not is_shared:
                _publish(operation, error, args, kwargs)
            raise

    return called


def _publish(operation: Callable[..., Any], error: Exception, args: Any, kwargs: Any) -> None:
    given = dict(kwargs)
    with contextlib.suppress(TypeError):  # the arguments do not fit, which is the error
        given = inspect.signature(operation).bind(*args, **kwargs).arguments
    name = given.get("name")
    with contextlib.suppress(Exception):  # this rank is not in the set
        comm = _ranks(given.get("process_set"))
        key = name if isinstance(name, str) else None
        _engine.collectives.report_error(comm, operation.__name__, error, key)


def _ranks(process_set: Any) -> _engine.Communicator:
    """Returns the communicator of a process set; of all ranks if the process set is invalid."""
    try:
        return runtime.communicator(process_set)
    except errors.ArgumentTypeError:
        return runtime.communicator()
