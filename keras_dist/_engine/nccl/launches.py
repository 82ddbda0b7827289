"""Launched operations, and the thread that watches them, see decision 56."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist._engine.shm.wait import also_blocked, blocked, note
from keras_dist._engine.tracing import spans
from keras_dist._gpu import Event

SPIN_SECONDS = 50e-6
LONGEST_NAP_SECONDS = 5e-3
CHECK_SECONDS = 0.2


def poll(is_done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Waits until something is done on the GPU."""
    began = checked = time.perf_counter()
    while not is_done():
        now = time.perf_counter()
        if now - checked > CHECK_SECONDS:
            checked = now
            check()
        if now - began > SPIN_SECONDS:
            time.sleep(min((now - began) / 8, LONGEST_NAP_SECONDS))


class Launch:
    """An operation that the GPU runs: a `Completion`."""

    def __init__(self, event: Event, ranks: Sequence[int], what: Any, arrays: Sequence[Any]):
        self.ranks, self.what = ranks, what
        self.error: Exception | None = None
        self._event, self._arrays = event, arrays

    def is_done(self) -> bool:
        return self.error is not None or self._event.is_reached()

    def fail(self, error: Exception) -> None:
        """Makes it fail, unless it has ended."""
        with contextlib.suppress(Exception):  # the GPU has failed: it has not ended
            if self.is_done():
                return
        self.error = error

    def forget(self) -> None:
        self._arrays = ()

    def wait(self) -> None:
        note(self.ranks, self.what)
        with also_blocked(), spans.phase_or_span("wait for the GPU"):
            poll(self.is_done, lambda: None)  # the watch checks
        self._raise()

    def hold(self, stream: int) -> None:
        """Makes later work of a stream wait for it; raises its error, if it is known."""
        self._raise()
        self._event.hold(stream)
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class LaunchWatch:
    """The thread that waits for every launch of a communicator."""

    def __init__(
        self,
        start: Callable[[], None],
        check: Callable[[], None],
        abort: Callable[[Exception], None],
    ):
        self._start, self._check, self._abort = start, check, abort
        self._launches: collections.deque[Launch] = collections.deque()
        self._changed = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None

    def add(self, launch: Launch) -> None:
        with self._changed:
            self._launches.append(launch)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="keras_dist gpu", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._launches)

    def close(self) -> None:
        with self._changed:
            self._ends = True
            self._launches.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def fail(self, error: Exception) -> None:
        with self._changed:
            for launch in self._launches:
                launch.fail(error)

    def _run(self) -> None:
        self._start()
        while (launch := self._next()) is not None:
            try:
                note(launch.ranks, launch.what)
                with blocked, spans.span(f"{launch.what.operation} on the GPU"):
                    poll(lambda: self._ends or launch.is_done(), self._check)
            except Exception as error:
                self.fail(error)
                self._abort(error)
            launch.forget()
            with self._changed:
                if self._launches and self._launches[0] is launch:
                    self._launches.popleft()
                self._changed.notify_all()

    def _next(self) -> Launch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ends or self._launches)
            return None if self._ends else self._launches[0]
