"""A ticket in the queue of collectives: a call that waits for its turn, or a queued operation."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from keras_dist import errors
from keras_dist._engine.tracing import spans

_log = logging.getLogger("keras_dist")


class Reordered(Exception):
    """The ranks have agreed to run another operation first. Raised on every rank."""

    def __init__(self, name: str | None):
        super().__init__(name)
        self.name = name


def in_flight(where: str, name: str) -> errors.ArgumentError:
    """Returns the error of two operations of one name."""
    return errors.ArgumentError(
        where,
        f"one operation named {name!r} at a time",
        "another one while the first is in flight",
        "Wait for the first operation, or give each a name of its own.",
    )


class UnseenError:
    """An error that scripts of other ranks have seen, and that of this rank has not: of its queue.

    The operation was queued here and blocking there. This rank raises the error at its next wait,
    where it would wait for ranks that have gone on.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def set(self, error: BaseException) -> None:
        self._error = error

    def check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self, error: BaseException | None = None) -> None:
        """Drops an error that the script has seen; any, by default."""
        if error is None or error is self._error:
            self._error = None


class Ticket:
    """A place in the queue."""

    def __init__(
        self,
        name: str | None = None,
        waiters: Iterable[int] = (),
        gives_way: bool = False,
        follows: bool = False,
    ):
        self.name, self.waiters = name, set(waiters)
        self.gives_way, self.follows = gives_way, follows
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ends the wait for it with an error; it will not run."""
        self.error = error

    def done(self) -> bool:
        """Returns whether the operation has ended. Does not block."""
        return False


class Handle(Ticket):
    """A queued operation, which runs while the script goes on.

    Returned by the functions whose names end in `_async`. The operation runs whether or not the
    handle is kept; an error that nobody asked for is logged.
    """

    def __init__(self, work: Callable[[], Any], what: str, name: str | None = None):
        super().__init__(name, gives_way=True)
        self._work: Callable[[], Any] = work
        self._what = what
        self._ended = threading.Event()
        self._result: Any = None
        self._reported = False
        self.unseen: UnseenError | None = None  # that of its queue

    def done(self) -> bool:
        """Returns whether the operation has ended, with a result or an error. Does not block."""
        return self._ended.is_set()

    def wait(self) -> Any:
        """Waits for the operation and returns its result. Blocks; further calls do not.

        Ranks may wait for their handles in any order, and several times.
        """
        if not self._ended.is_set():
            if self.unseen is not None:
                self.unseen.check()
            try:
                self.waiters.add(threading.get_ident())
                with spans.span("wait for a queued operation"):
                    self._ended.wait()
            finally:
                self.waiters.discard(threading.get_ident())
        if self.error is not None:
            self._reported = True
            if self.unseen is not None:
                self.unseen.forget(self.error)
            try:
                raise self.error
            finally:
                del self  # as in `_run`
        return self._result

    __call__ = wait  # scripts for Horovod call the handle of a sparse reduction

    def _run(self) -> bool:
        """Runs the operation in the calling thread; returns whether it succeeded."""
        try:
            self._result = self._work()
        except Reordered:
            raise  # it has not run
        except BaseException as error:  # any error belongs to the thread that waits
            self.error = error
        succeeded = self.error is None
        self._end()
        del self  # the traceback holds this frame, which would keep the handle alive
        return succeeded

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._end()

    def _end(self) -> None:
        del self._work  # releases the values
        self._ended.set()

    def _log_error(self) -> None:
        if self.error is not None and not self._reported:
            self._reported = True
            _log.error(
                "A queued %s that nobody waited for failed: %s: %s",
                self._what,
                type(self.error).__name__,
                self.error,
            )

    def __del__(self) -> None:
        self._log_error()
