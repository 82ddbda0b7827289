"""The errors of keras_dist. Knows nothing but their names and how they read.

Every error says where it happened (`[rank r of n]`), what was expected, what was
received and what to do about it; `explain` puts the four together.

```
KerasDistError
├── LaunchError        (RuntimeError)  the job was not started as it should have been
├── ArgumentError      (ValueError)    an argument has a value that cannot be used
├── ArgumentTypeError  (TypeError,     an argument is of a kind that cannot be used
│                       ValueError)
├── DataError          (ValueError)    the data cannot be shared out over the ranks
├── MismatchError      (RuntimeError)  the ranks do not mean the same thing
├── UsageError         (RuntimeError)  a call came where it has no meaning
├── RankError          (RuntimeError)  what ranks do together, or run for a caller, failed on one
├── RankLostError      (RuntimeError)  a rank has died, and others wait for it
├── CellError          (RuntimeError)  a cell of a notebook failed on a rank
├── BackendError     (RuntimeError)  Keras or its backend does not do what keras_dist rests on
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


class KerasDistError(Exception):
    """The base of every error that keras_dist raises on purpose."""


class LaunchError(KerasDistError, RuntimeError):
    """The job was not started as it should have been, or MPI cannot be used."""


class ArgumentError(KerasDistError, ValueError):
    """An argument has a value that cannot be used."""


class ArgumentTypeError(KerasDistError, TypeError, ValueError):
    """An argument is of a kind that cannot be used.

    A `ValueError` as well: scripts written for Horovod catch that.
    """


class DataError(KerasDistError, ValueError):
    """The data cannot be shared out over the ranks."""


class MismatchError(KerasDistError, RuntimeError):
    """The ranks do not mean the same thing. Raised on every rank, with the same text."""


class UsageError(KerasDistError, RuntimeError):
    """A call came where it has no meaning, before or after others."""


class RankError(KerasDistError, RuntimeError):
    """What ranks do together failed on one.

    A reduction raises it on every rank when one of them could not do its share. `keras_dist.run`
    raises it where it was called when the function that it runs on ranks failed on one; its cause
    is the exception itself, where that can be brought here.

    Args:
        message: what happened.
        rank: the rank on which it did; `None` when the job ended without a word of it.
        traceback: where it did, as text.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class RankLostError(KerasDistError, RuntimeError):
    """A rank has died while others wait for it. Raised on those that wait."""


class CellError(KerasDistError, RuntimeError):
    """A cell of a notebook that all ranks run failed on this one."""


class BackendError(KerasDistError, RuntimeError):
    """Keras or its backend does not do what keras_dist rests on.

    While a `tf.function` of a script is traced, TensorFlow raises a `StagingError` with its text in
    its place.
    """


class CallbackError(KerasDistError, RuntimeError):
    """A callback failed on the root. Raised on every rank."""


class CheckpointError(KerasDistError, OSError):
    """A checkpoint could not be written or read. Raised on every rank."""


def explain(where: str, expected: str, received: str, remedy: str) -> str:
    """Puts the four parts of an error message together.

    Args:
        where: the place, normally `runtime.where()`, such as `"[rank 1 of 4]"`.
        expected: what was expected, a phrase without a full stop.
        received: what came instead, a phrase without a full stop.
        remedy: what the user should do, one or more whole sentences.

    Returns:
        One line: `"[rank 1 of 4] Expected ... Received: ... <remedy>"`.
    """
    return f"{where} Expected {expected}. Received: {received}. {remedy}"
