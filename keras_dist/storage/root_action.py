"""Work that only the root does, or each rank for itself; a failure is raised on all ranks."""

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator
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
    """Calls a function on the root, returns its result on all. Collective: every rank; blocks."""
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
    """Calls a function on each rank; returns all results, in rank order. Collective; blocks."""
    mine: Any
    cause: Exception | None = None
    try:
        mine = work()
    except errors.KerasDistError as error:
        mine = error
    except Exception as error:  # the other ranks wait
        cause, received = error, f"{type(error).__name__}: {error}"
        expected, remedy = f"{operation} without an error", "Fix the error on this rank."
        mine = errors.CheckpointError(expected, received, remedy)
    everyone = _engine.collectives.allgather_object(
        runtime.fit_communicator(), mine, operation=operation
    )
    failed = [result for result in everyone if isinstance(result, errors.KerasDistError)]
    if failed:
        raise failed[0] from cause
    return everyone


REMEDY = (
    "Training continues, and earlier files are unchanged. Free space, or repair the file system: "
    "the next write is tried as usual."
)
# Errors of a full disk, quota or limit, or of a failing device or server: the path is right, and
# the error may pass.
TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)

_log = logging.getLogger("keras_dist")


class RetryPolicy:
    """Decides which failed writes of a callback are errors.

    A full or failing disk does not end the training, nor does any failure after a successful
    write: the training is worth more than one checkpoint. Any other failure is raised, because
    the path is probably wrong.
    """

    def __init__(self) -> None:
        self._has_succeeded = False

    @contextlib.contextmanager
    def attempt(self, expected: str) -> Iterator[None]:
        """Returns a context that a failure leaves; logs one that is not raised."""
        try:
            yield
        except OSError as error:
            self.judge(error, expected)

    def judge(self, error: OSError, expected: str) -> None:
        """Raises a failure, or logs it if training should continue; see `attempt`."""
        reason = _reason(error)
        is_transient = isinstance(reason, OSError) and reason.errno in TRANSIENT
        if not self._has_succeeded and not is_transient:
            raise error
        self.log(error, expected)

    def succeed(self) -> None:
        """Notes a successful write, of this process or of the one whose place it may take."""
        self._has_succeeded = True

    def log(self, error: OSError, expected: str, remedy: str = REMEDY) -> None:
        """Logs a failure that does not end the training."""
        reason = _reason(error)
        received = f"{type(reason).__name__}: {reason}"
        _log.warning(errors.explain(runtime.where(), expected, received, remedy))


def _reason(error: OSError) -> BaseException:
    return (error.__cause__ if isinstance(error, errors.CheckpointError) else None) or error
