"""The exception classes of keras_dist and the format of their messages.

Every message states where the error occurred (`[rank r of n]`), what was expected, what was
received and the remedy; `explain` formats the four parts.

```
KerasDistError
├── LaunchError        (RuntimeError)  the job was started incorrectly
├── ArgumentError      (ValueError)    an argument has an invalid value
├── ArgumentTypeError  (TypeError,     an argument has an invalid type
│                       ValueError)
├── DataError          (ValueError)    the data cannot be sharded over the ranks
├── MismatchError      (RuntimeError)  the ranks call different operations or pass different values
├── UsageError         (RuntimeError)  a call is not valid in the current state
├── RankError          (RuntimeError)  a collective, or a function run on ranks, failed on a rank
├── RankLostError      (RuntimeError)  a rank that others wait for has died
├── CellError          (RuntimeError)  a notebook cell failed on a rank
├── BackendError       (RuntimeError)  Keras or its backend behaves unexpectedly
├── CallbackError      (RuntimeError)  a callback failed on the root
└── CheckpointError    (OSError)       a checkpoint could not be written or read
```
"""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendError",
    "CallbackError",
    "CellError",
    "CheckpointError",
    "DataError",
    "KerasDistError",
    "LaunchError",
    "MismatchError",
    "RankError",
    "RankLostError",
    "UsageError",
    "explain",
]


from collections.abc import Callable
from typing import Any

PARTS = 4  # of a message
#: returns the place of this process in its job, once `runtime` is imported, which sets it
where: Callable[[], str] = lambda: "[without a job]"  # noqa: E731


class KerasDistError(Exception):
    """Base class of the errors of keras_dist.

    Args:
        *parts: the message, or its four parts as `explain` takes them; without the first, it is the
            place of this process. Subclasses may have others.
    """

    is_shared = False  # whether it is known to all ranks, though this one raises it at another wait

    def __init__(self, *parts: Any):
        is_explained = len(parts) in (PARTS, PARTS - 1) and all(isinstance(p, str) for p in parts)
        if is_explained and len(parts) < PARTS:
            parts = where(), *parts
        super().__init__(*((explain(*parts),) if is_explained else parts))


class LaunchError(KerasDistError, RuntimeError):
    """The job was started incorrectly, or MPI cannot be used."""


class ArgumentError(KerasDistError, ValueError):
    """An argument has an invalid value."""


class ArgumentTypeError(KerasDistError, TypeError, ValueError):
    """An argument has an invalid type.

    Also a `ValueError`, which scripts written for Horovod catch.
    """


class DataError(KerasDistError, ValueError):
    """The data cannot be sharded over the ranks."""


class MismatchError(KerasDistError, RuntimeError):
    """The ranks call different operations or pass different values.

    Raised on every rank, with the same text.
    """


class UsageError(KerasDistError, RuntimeError):
    """A call is not valid in the current state."""


class RankError(KerasDistError, RuntimeError):
    """A collective, or a function run on ranks, failed on a rank.

    A reduction raises it on every rank when one rank fails. `keras_dist.run` raises it in the
    calling process when the function fails on a rank; its cause is the original exception, if that
    can be pickled.

    Args:
        message: what happened.
        rank: the rank that failed; `None` if the job ended without reporting it.
        traceback: the traceback of that rank, as text.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class RankLostError(KerasDistError, RuntimeError):
    """A rank has died while others wait for it. Raised on the waiting ranks."""


class CellError(KerasDistError, RuntimeError):
    """A notebook cell that all ranks run failed on this rank."""


class BackendError(KerasDistError, RuntimeError):
    """Keras or its backend behaves unexpectedly.

    While a `tf.function` is traced, TensorFlow raises a `StagingError` with the same text instead.
    """


class CallbackError(KerasDistError, RuntimeError):
    """A callback failed on the root. Raised on every rank."""


class CheckpointError(KerasDistError, OSError):
    """A checkpoint could not be written or read. Raised on every rank."""


def explain(where: str, expected: str, received: str, remedy: str) -> str:
    """Formats the four parts of an error message.

    Args:
        where: the location, normally `runtime.where()`, such as `"[rank 1 of 4]"`.
        expected: what was expected, a phrase without a full stop.
        received: what was received, a phrase without a full stop.
        remedy: what the user should do, one or more whole sentences.

    Returns:
        One line: `"[rank 1 of 4] Expected ... Received: ... <remedy>"`.
    """
    return f"{where} Expected {expected}. Received: {received}. {remedy}"
