"""Error policy for file writes: raise if the path is wrong, else log and continue training."""

import errno
import logging
from collections.abc import Callable

from keras_dist import errors, runtime

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

    def attempt(self, write: Callable[[], bool], expected: str) -> bool:
        """Calls `write`; logs a failure that is not raised."""
        try:
            self._has_succeeded = write() or self._has_succeeded
        except OSError as error:
            self.judge(error, expected)
            return False
        return True

    def judge(self, error: OSError, expected: str) -> None:
        """Raises a failure, or logs it if training should continue; see `attempt`."""
        if not self._has_succeeded and not _is_transient(_reason(error)):
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


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in TRANSIENT
