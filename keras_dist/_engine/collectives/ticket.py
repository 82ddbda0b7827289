"""What stands in the line: a call that waits for its turn, or a queued operation. Knows no line."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from keras_dist import errors
from keras_dist._engine.tracing import spans

__all__ = ["Handle", "NameInFlightError", "Reordered", "Ticket", "in_flight"]

_log = logging.getLogger("keras_dist")


class Reordered(Exception):
    """The ranks have agreed to run another operation first. Comes of a meeting, on every rank.

    Args:
        name: that of the operation; it may be the one that was about to run.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class NameInFlightError(Exception):
    """An operation was asked for while another of its name is called or queued on this rank."""


def in_flight(where: str, name: str) -> str:
    """Returns what an `ArgumentError` says of a name that was given to two operations."""
    return errors.explain(
        where,
        f"one operation named {name!r} at a time",
        "another one while the first is in flight",
        "Wait for the first, or give each a name of its own.",
    )


class Ticket:
    """A place in the line.

    Args:
        name: what the user calls the operation that stands there, if anything.
        waiters: the threads that wait for it, by `threading.get_ident`.
    """

    def __init__(self, name: str | None = None, waiters: Iterable[int] = ()):
        self.name, self.waiters = name, set(waiters)

    def done(self) -> bool:
        """Tells whether what stands there has ended. Does not block."""
        return False


class Handle(Ticket):
    """An operation that was queued: it waits, runs or has ended while the script goes on.

    Made by the functions whose names end in `_async`. The operation runs whether or not the
    handle is kept; an error that nobody has asked for is logged.
    """

    def __init__(self, work: Callable[[], Any], what: str, name: str | None = None):
        super().__init__(name)
        self._work: Callable[[], Any] = work
        self._what = what
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        """Tells whether the operation has ended, well or not. Does not block."""
        return self._ended.is_set()

    def wait(self) -> Any:
        """Waits for the operation and returns its result. Blocks; further calls do not.

        The ranks may wait for their handles in any order, and each as often as it likes.

        Raises:
            KerasDistError: what the blocking operation raises.
        """
        if not self._ended.is_set():
            try:
                self.waiters.add(threading.get_ident())
                with spans.span("wait for what is queued"):
                    self._ended.wait()
            finally:
                self.waiters.discard(threading.get_ident())
        if self._error is not None:
            self._told = True
            try:
                raise self._error
            finally:
                del self  # as in `_run`
        return self._result

    __call__ = wait  # of a sparse reduction Horovod's scripts ask the result so

    def _run(self) -> bool:
        """Runs the operation in the calling thread; returns whether it went well."""
        try:
            self._result = self._work()
        except Reordered:
            raise  # it has not run
        except BaseException as error:  # whatever it is, it belongs to who waits
            self._error = error
        well = self._error is None
        del self._work  # lets go of the values
        self._ended.set()
        del self  # the traceback leads to this frame, which would hold the handle by it
        return well

    def _tell(self) -> None:
        """Logs the error, unless there is none or somebody has been told."""
        if self._error is not None and not self._told:
            self._told = True
            _log.error(
                "A queued %s that nobody waited for failed: %s: %s",
                self._what,
                type(self._error).__name__,
                self._error,
            )

    def __del__(self) -> None:
        self._tell()
