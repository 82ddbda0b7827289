"""Who is next: collectives in the order in which they were asked for. Knows no MPI.

All ranks must run the same collectives in the same order. While a script only calls blocking
ones, its own order is that order, and a lock is enough. Once it queues operations that run
behind its back, a blocking call may come while others still wait; it must not overtake them
on one rank and come after them on another. So there is one line. A blocking call stands in it
itself; a queued operation leaves its `Handle` there, and a thread of the engine runs it when
it is at the front. When anything runs depends on time, what runs before what does not.

Operations to which a script gives names need no order: where the ranks find that those in front
differ, they agree on one that all have in their lines, and it is taken to the front (`Reordered`).
Of one name there is one operation at a time. Another is refused, which is noted when the first has
ended, until the ranks have met.
"""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from keras_dist._compat.python import is_foreign_thread, is_mine
from keras_dist._engine.collectives.ticket import Handle, NameInFlightError, Reordered, Ticket

__all__ = ["CollectiveQueue"]

OWN = "keras_dist"  # so the names of threads begin that are none of the script's

R = TypeVar("R")


class CollectiveQueue:
    """A lock that is taken in the order in which it was asked for, and the thread behind it.

    Within a collective that holds it, in any thread, it can be taken again.

    Args:
        lock: the `RLock` that collectives have held so far. It stays what lets one run at a
            time: some thread may hold it, or wait for it, while the line takes its place.
    """

    def __init__(self, lock: Any):
        self._lock = lock
        self._line: collections.deque[Ticket] = collections.deque()  # the front is at work
        self._moved = threading.Condition()
        self._failed: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._refused: frozenset[str] = frozenset()  # while the first of its name is in flight
        self.refused: frozenset[str] = frozenset()
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if is_mine(self._lock):  # a part of a collective
            self._lock.acquire()
            return
        place = Ticket(waiters=[threading.get_ident()])
        try:
            self._stand(place)
            self._come(place)
        except BaseException:  # an interrupt: those behind must not wait for it
            with contextlib.suppress(ValueError):
                self._leave(place)
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not is_mine(self._lock):
            self._leave(self._line[0])

    def run(self, work: Callable[[], R], name: str) -> R:
        """Runs an operation with a name, in its turn or when the ranks agree on it. Blocks.

        Args:
            work: the operation; it is called again where another one comes first.
            name: what the user calls it.

        Raises:
            NameInFlightError: another one has that name.
        """
        if is_mine(self._lock):
            return work()
        place = Ticket(name, [threading.get_ident()])
        try:
            self._stand(place)
            while True:
                self._come(place)
                try:
                    return work()
                except Reordered as other:
                    self._take_to_the_front(other.name)
                finally:
                    self._lock.release()
        finally:
            with contextlib.suppress(ValueError):  # an interrupt may come before it stands there
                self._leave(place)

    def standing(self) -> tuple[tuple[str, ...], bool]:
        """Returns the names in the line, from its front, and whether no more will come by itself.

        None will when every Python thread of the script waits for something in the line.
        """
        with self._moved:
            names = tuple(place.name for place in self._line if place.name is not None)
            # In this order: who waits starts no thread, and who comes now has to wait for the lock.
            waiters = set[int]().union(*(place.waiters for place in self._line))
            return names, all(one.ident in waiters for one in _threads_of_script())

    def queue(self, work: Callable[[], Any], what: str, name: str | None = None) -> Handle:
        """Puts an operation at the end of the line. Does not block.

        Args:
            work: the operation; it is called in the thread of the engine, again where another
                one comes first.
            what: what it is called in messages.
            name: what the user calls it, if anything.

        Raises:
            RuntimeError: the line is closed.
            NameInFlightError: another one has that name.
        """
        handle = Handle(work, what, name)
        with self._moved:
            if self._closed:
                raise RuntimeError(f"{what} was queued for ranks that have been left")
            self._append(handle)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=OWN, daemon=True)
                self._thread.start()
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
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (handle := self._next()) is not None:
            try:
                with self._lock:
                    if not handle._run():
                        self._failed.add(handle)
                self._leave(handle)
            except Reordered as other:
                self._take_to_the_front(other.name)
            del handle  # who dropped it may be told of an error now, not at the next operation

    def _next(self) -> Handle | None:
        """Waits for a handle at the front; `None` when there will be none."""
        with self._moved:
            self._moved.wait_for(lambda: self._closed or self._handle_in_front() is not None)
            return self._handle_in_front()

    def _handle_in_front(self) -> Handle | None:
        front = self._line[0] if self._line else None
        return front if isinstance(front, Handle) else None

    def _stand(self, place: Ticket) -> None:
        with self._moved:
            self._append(place)

    def _append(self, place: Ticket) -> None:
        names = {other.name for other in self._line if not other.done()}
        if place.name is not None and place.name in names:
            self._refused |= {place.name}
            raise NameInFlightError(place.name)
        self._line.append(place)

    def forget_refused(self, name: str) -> None:
        """Forgets that an operation was refused."""
        with self._moved:
            self.refused -= {name}

    def _come(self, place: Ticket) -> None:
        """Waits until a place is at the front, and takes the lock."""
        with self._moved:
            self._moved.wait_for(lambda: self._line[0] is place)
        self._lock.acquire()

    def _take_to_the_front(self, name: str) -> None:
        with self._moved:
            chosen = next((place for place in self._line if place.name == name), None)
            if chosen is None:
                return  # its caller was interrupted; the others will hear so at the next meeting
            self._line.remove(chosen)
            self._line.appendleft(chosen)
            self._moved.notify_all()

    def _leave(self, place: Ticket) -> None:
        with self._moved:
            self._line.remove(place)
            over = self._refused & {place.name}
            self._refused, self.refused = self._refused - over, self.refused | over
            self._moved.notify_all()


def _threads_of_script() -> list[threading.Thread]:
    # A framework's own threads, which Python has met and knows no more of, work for one of these.
    return [
        one
        for one in threading.enumerate()
        if not (one.name.startswith(OWN) or is_foreign_thread(one))
    ]
