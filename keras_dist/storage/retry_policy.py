"""What becomes of a write that fails: an error where the path is wrong, else training goes on."""

import errno
import logging
from collections.abc import Callable

from keras_dist import errors, runtime

__all__ = ["RetryPolicy"]

GOES_ON = (
    "Training goes on, and what was written before stays as it is. Make room, or mend the file "
    "system: the next write is tried as usual."
)
# What a disk, a quota or a limit says that is full, and a device or a server that fails: nothing
# is wrong with the path, and it may pass.
OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)

_log = logging.getLogger("keras_dist")


class RetryPolicy:
    """The writes of one callback on the root.

    A disk that is full or fails does not end the training, nor does anything that comes after a
    write which succeeded: it is worth more than one more checkpoint. A failure before that is an
    error, as the path is likely to be wrong, unless it says that there is no room.
    """

    def __init__(self) -> None:
        self._has_succeeded = False

    def make(self, write: Callable[[], bool], expected: str) -> bool:
        """Makes one; a failure that does not count is logged.

        Args:
            write: writes a file; returns whether there was one to write.
            expected: what it is to do, for messages.

        Returns:
            Whether it succeeded.

        Raises:
            OSError: the failure, where it counts.
        """
        try:
            self._has_succeeded = write() or self._has_succeeded
        except OSError as error:
            reason = error.__cause__ if isinstance(error, errors.CheckpointError) else error
            if not self._has_succeeded and not _is_out_of_room(reason or error):
                raise
            received = f"{type(reason).__name__}: {reason}"
            _log.warning(errors.explain(runtime.where(), expected, received, GOES_ON))
            return False
        return True


def _is_out_of_room(error: BaseException) -> bool:
    """Tells whether the disk is full, or fails, rather than the path being wrong."""
    return isinstance(error, OSError) and error.errno in OUT_OF_ROOM
