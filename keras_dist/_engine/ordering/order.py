"""One collective at a time, in the order of the calls."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from keras_dist._engine.ordering.queue import CollectiveQueue, HeldNames, names_without_queue
from keras_dist._engine.ordering.ticket import Handle
from keras_dist._engine.tracing import spans

_waits: list[Callable[[], None]] = []
R = TypeVar("R")


def set_completion(wait: Callable[[], None]) -> None:
    """Makes every collective call a function first, which waits for programs of a framework."""
    # JAX returns from a compiled program while that still waits for its inputs. If the next call of
    # the script overtook the collectives of the program on one rank and not on another, the ranks
    # would exchange the wrong data, without an error where shapes are equal.
    if wait not in _waits:
        _waits.append(wait)


def finish_pending() -> None:
    """Waits for programs that this thread has started, which may need locks: hold none."""
    for wait in _waits:
        wait()


class CollectiveOrder:
    """Runs the collectives of one communicator one at a time, in the order of the calls.

    TensorFlow may call from any of its threads. While all calls block, a lock is enough; the first
    operation that is queued or has a name replaces it by a `CollectiveQueue`.
    """

    def __init__(self, label: str, where: Callable[[], str], job: "CollectiveOrder | None" = None):
        self._label, self._where, self._job = label, where, job
        self._lock: Any = threading.RLock()
        self._queue: CollectiveQueue | None = None  # replaces the lock
        self._lane: spans.Lane | None = None

    @property
    def lock(self) -> Any:
        """The context manager that a collective holds while it runs."""
        finish_pending()
        lock, recorder = (self._job or self)._lock, spans.recorder
        return lock if recorder is None else spans.RecordedLock(self._lane_of(recorder), lock)

    def _lane_of(self, recorder: spans.Recorder) -> spans.Lane:
        if self._lane is None or self._lane.recorder is not recorder:
            self._lane = spans.Lane(self._label, recorder)
        return self._lane

    def queue(self, work: Callable[[], Any], what: str, name: str | None = None) -> Handle:
        """Queues a collective, which a thread runs in its turn; waits for pending programs only."""
        if self._job is not None:
            return self._job.queue(work, what)
        finish_pending()
        return self._make_queue().queue(spans.queued(work), what, name)

    def run_by_name(self, work: Callable[[], R], name: str | None) -> R:
        """Runs a collective that ranks match by its name. Collective: every rank; blocks."""
        if self._job is not None or (name is None and self._queue is None):
            return work()
        finish_pending()
        return self._make_queue().run(work, name)

    @property
    def refused(self) -> frozenset[str]:
        """Names of operations refused since the last rendezvous; see `resolve_refused`."""
        return self._queue.refused if self._queue is not None else frozenset()

    def forget_refused(self, name: str) -> None:
        if self._queue is not None:
            self._queue.forget_refused(name)

    def held_names(self) -> HeldNames:
        """Returns the operations in flight; this thread is at a rendezvous of the first."""
        return names_without_queue() if self._queue is None else self._queue.held_names()

    def end_waits(self, error: BaseException, of_all: bool) -> None:
        """Raises an error also where this script waits; see `CollectiveQueue.end_waits`."""
        if self._queue is not None:
            self._queue.end_waits(error, of_all)

    def finish(self) -> None:
        queue = (self._job or self)._queue
        if queue is not None:
            queue.finish()

    def drain(self) -> None:
        """Waits until all queued operations have run; logs the errors that nobody asked for."""
        finish_pending()
        queue = (self._job or self)._queue
        if queue is not None:
            queue.drain()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def _make_queue(self) -> CollectiveQueue:
        if self._queue is None:
            with self._lock:  # two threads may come here; one makes the queue
                if self._queue is None:
                    self._lock = self._queue = CollectiveQueue(self._lock, self._where)
        return self._queue
