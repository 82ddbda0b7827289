"""Argument errors of one rank, raised on all ranks, so that the job can continue in step.

A collective begins with a rendezvous. A rank that rejects its arguments before it would leave the
other ranks waiting, and would be one operation behind if its script continued.
"""

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from keras_dist import _engine, errors, runtime
from keras_dist.runtime.process_sets import ProcessSet

P = ParamSpec("P")
R = TypeVar("R")


def raises_on_all(operation: Callable[P, R]) -> Callable[P, R]:
    """Makes the errors of a collective before its rendezvous those of all ranks. Collective."""
    # A rank whose arguments are invalid waits for the others, which raise its error as well.
    count = _engine.collectives.rendezvous_count

    @functools.wraps(operation)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = count()
        try:
            return operation(*args, **kwargs)
        except Exception as error:  # conversion of a value may raise any error
            # An error of another operation, which all ranks know, may end the wait for this one.
            is_shared = isinstance(error, errors.KerasDistError) and error.is_shared
            if count() != before or is_shared:
                raise
            told = _explained(operation.__name__, args, kwargs, error)
            publish(operation.__name__, operation, told, args, kwargs)
            if told is error:
                raise
            raise told from error

    return called


def _explained(what: str, args: Any, kwargs: Any, error: Exception) -> Exception:
    """Explains an error of a value that is no tensor, such as `None`; returns any other error."""
    if not isinstance(error, AttributeError):
        return error
    first = next(iter((*args, *kwargs.values())), None)
    several = first if isinstance(first, list | tuple) else [first]
    kinds = dict.fromkeys(type(value).__name__ for value in several)
    return errors.ArgumentTypeError(
        runtime.where(),
        f"tensors or arrays in {what}",
        f"{', '.join(kinds)} ({error})",
        f"Pass tensors of the framework whose functions you call; keras_dist.{what} takes numbers "
        "and arrays of numpy.",
    )


def publish(
    what: str, function: Callable[..., Any], error: Exception, args: Any, kwargs: Any
) -> None:
    """Raises the error of a call of a collective, before its rendezvous, on the other ranks."""
    given = dict(kwargs)
    with contextlib.suppress(TypeError):  # the arguments do not fit, which is the error
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    name = given.get("name")
    with contextlib.suppress(Exception):  # this rank is not in the set
        comm = _ranks(given.get("process_set"))
        key = name if isinstance(name, str) else None
        _engine.collectives.report_error(comm, what, error, key)


def _ranks(process_set: Any) -> _engine.Communicator:
    """Returns the communicator of a process set; of all ranks if the process set is invalid."""
    try:
        return runtime.communicator(process_set)
    except errors.ArgumentTypeError:
        return runtime.communicator()


# Raised on all ranks already.
AGREED = (errors.MismatchError, errors.RankError, errors.RankLostError)


@contextlib.contextmanager
def raise_on_all(process_set: ProcessSet | None = None) -> Iterator[None]:
    """Raises an exception of one rank on all ranks. Context manager or decorator.

    At the end of the block the ranks wait for each other. If the block has raised an exception on a
    rank, all ranks raise it: an equal one, of the same class. So a script that catches it, such as
    a search that prunes trials, goes on with the same calls on every rank. If it is raised on
    several ranks, that of the first is raised on all. Exceptions that are not an `Exception`, such
    as `KeyboardInterrupt`, and those that collectives raise on all ranks, pass.

    Collective: every rank enters the block, at the same place of the script; its end blocks. Use it
    around the body of a callback's method, or of a loop; not in a compiled function.

    Args:
        process_set: the ranks that raise; a trial that is trained by a set passes the set.
            Defaults to all ranks.

    Raises:
        RankError: an exception cannot be pickled, for example because its class is defined in a
            function; raised on every rank in place of it.
        MismatchError: a rank is at another place of the script; raised on every rank.

    Example:
    ```python
    class Pruned(Exception):
        pass

    class Prune(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with keras_dist.raise_on_all():
                if keras_dist.rank() == 0 and logs["loss"] > 1e6:
                    raise Pruned

    try:
        model.fit(dataset, callbacks=keras_dist.callbacks(Prune()))
    except Pruned:
        pass                                        # on every rank
    ```
    """
    comm = runtime.communicator(process_set)
    try:
        yield
    except AGREED:
        raise
    except Exception as error:
        _rendezvous(comm, error)
        raise
    _rendezvous(comm, None)


def _rendezvous(comm: _engine.Communicator, mine: Exception | None) -> None:
    """Raises the exception of the first rank that has one, unless it is that of this rank."""
    everyone = _engine.collectives.allgather_object(
        comm, None if mine is None else _packed(comm, mine), operation="the end of raise_on_all"
    )
    first = next((index for index, packed in enumerate(everyone) if packed is not None), None)
    if first is None:
        return
    raised = pickle.loads(everyone[first])
    if first != comm.rank or type(raised) is not type(mine):
        raised.add_note(f"Raised first on rank {comm.ranks[first]}, see keras_dist.raise_on_all.")
        raise raised from mine


def _packed(comm: _engine.Communicator, error: Exception) -> bytes:
    """Returns the pickled exception, or a `RankError` if another process could not read it."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception as failure:  # of the user's class
        text = errors.explain(
            comm.where(),
            "an exception that can be pickled, to be raised on all ranks",
            f"{type(error).__name__}: {error} ({type(failure).__name__}: {failure})",
            "Define its class at the top of a module, with the arguments that it passes to "
            "super().__init__.",
        )
        return pickle.dumps(errors.RankError(text, comm.job.rank))
