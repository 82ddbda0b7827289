"""Who is next: collectives in the order in which they were asked for. Knows no MPI.

All ranks must run the same collectives in the same order. While a script only calls blocking
ones, its own order is that order, and a lock is enough. Once it queues operations that run
behind its back, a blocking call may come while others still wait; it must not overtake them
on one rank and come after them on another. So there is one line. A blocking call stands in it
itself; a queued operation leaves its `Handle` there, and a thread of the engine runs it when
it is at the front. When anything runs depends on time, what runs before what does not.
"""

import collections
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from keras_dist._engine import timeline

__all__ = ["Handle", "Line"]

_log = logging.getLogger("keras_dist")


class Handle:
    """An operation that was queued: it waits, runs or has ended while the script goes on.

    Made by the functions whose names end in `_async`. The operation runs whether or not the
    handle is kept; an error that nobody has asked for is logged.
    """

    def __init__(self, work: Callable[[], Any], what: str):
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
            with timeline.span("wait for what is queued"):
                self._ended.wait()
        if self._error is not None:
            self._told = True
            try:
                raise self._error
            finally:
                del self  # as in `_run`
        return self._result

    def _run(self) -> bool:
        """Runs the operation in the calling thread; returns whether it went well."""
        try:
            self._result = self._work()
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


class Line:
    """A lock that is taken in the order in which it was asked for, and the thread behind it.

    Within a collective that holds it, in any thread, it can be taken again.

    Args:
        lock: the `RLock` that collectives have held so far. It stays what lets one run at a
            time: some thread may hold it, or wait for it, while the line takes its place.
    """

    def __init__(self, lock: Any):
        self._lock = lock
        self._line: collections.deque[object] = collections.deque()  # the front is at work
        self._moved = threading.Condition()
        self._failed: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="keras_dist", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # as `threading.Condition` asks: a part of a collective
            self._lock.acquire()
            return
        place = object()
        try:
            with self._moved:
                self._line.append(place)
                self._moved.wait_for(lambda: self._line[0] is place)
            self._lock.acquire()
        except BaseException:  # an interrupt: those behind must not wait for it
            with contextlib.suppress(ValueError):
                self._leave(place)
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._lock._is_owned():
            self._leave(self._line[0])

    def queue(self, work: Callable[[], Any], what: str) -> Handle:
        """Puts an operation at the end of the line. Does not block.

        Args:
            work: the operation; it is called in the thread of the engine.
            what: what it is called in messages.

        Raises:
            RuntimeError: the line is closed.
        """
        handle = Handle(work, what)
        with self._moved:
            if self._closed:
                raise RuntimeError(f"{what} was queued for ranks that have been left")
            self._line.append(handle)
            self._moved.notify_all()
        return handle

    def drain(self) -> None:
        """Waits until everything queued has run; logs the errors nobody has asked for."""
        with self:
            pass
        for handle in list(self._failed):
            handle._tell()

    def close(self) -> None:
        """Drains the line and ends its thread."""
        self.drain()
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        while (handle := self._next()) is not None:
            with self._lock:
                if not handle._run():
                    self._failed.add(handle)
            self._leave(handle)
            del handle  # who dropped it may be told of an error now, not at the next operation

    def _next(self) -> Handle | None:
        """Waits for a handle at the front; `None` when there will be none."""
        with self._moved:
            self._moved.wait_for(lambda: self._closed or self._handle_in_front() is not None)
            return self._handle_in_front()

    def _handle_in_front(self) -> Handle | None:
        front = self._line[0] if self._line else None
        return front if isinstance(front, Handle) else None

    def _leave(self, place: object) -> None:
        with self._moved:
            self._line.remove(place)
            self._moved.notify_all()
