"""A queue of collectives, and the thread that runs the queued ones, see decision 18.

Timing decides when an operation runs, never before which other one. Where the ranks find that named
operations at the front differ, they agree on one that all hold and run it first (`Reordered`). Only
one operation of a name is in flight at a time: another one is refused. The queue remembers the
refusal until the first operation has ended and the ranks have met again.
"""

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from keras_dist import errors
from keras_dist._compat.python import is_foreign_thread, is_mine
from keras_dist._engine.ordering.ticket import Handle, Reordered, Ticket, UnseenError, in_flight
from keras_dist._engine.shm.wait import nap_unless

OWN = "keras_dist"  # prefix of the names of the package's own threads

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class HeldNames:
    """The operations that a rank holds, as other ranks need to know them."""

    names: tuple[str | None, ...]
    is_complete: bool
    gives_way: bool
    is_awaited: bool


class CollectiveQueue:
    """A reentrant lock, taken in the order of the calls, and a thread for queued operations."""

    def __init__(self, lock: Any, where: Callable[[], str]):
        self._lock, self._where = lock, where
        self._tickets: collections.deque[Ticket] = collections.deque()  # the first one runs
        self._changed = threading.Condition()
        self._failed: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._unseen = UnseenError()
        self._refused_in_flight: frozenset[str] = frozenset()
        self.refused: frozenset[str] = frozenset()  # the operation of that name has ended
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if is_mine(self._lock):  # part of a collective
            self._lock.acquire()
            return
        ticket = Ticket(waiters=[threading.get_ident()])
        try:
            self._add(ticket)
            self._wait_for_turn(ticket)
        except BaseException:  # an interrupt: the operations behind must not wait for this one
            with contextlib.suppress(ValueError):
                self._remove(ticket)
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not is_mine(self._lock):
            self._remove(self._tickets[0])

    def run(self, work: Callable[[], R], name: str | None, follows: bool = False) -> R:
        """Runs an operation, in its turn or when the ranks agree on it. Blocks."""
        if is_mine(self._lock):
            return work()
        ticket = Ticket(name, [threading.get_ident()], gives_way=True, follows=follows)
        try:
            self._add(ticket)
            while True:
                self._wait_for_turn(ticket)
                try:
                    return work()
                except Reordered as other:
                    self._move_to_front(other.name)
                finally:
                    self._lock.release()
        finally:
            with contextlib.suppress(ValueError):  # an interrupt may come before it is added
                self._remove(ticket)

    def held_names(self) -> HeldNames:
        """Returns the names of queued operations, and whether every script thread waits in one."""
        with self._changed:
            if not self._tickets:
                return names_without_queue()
            front = self._tickets[0]
            every = [ticket.name for ticket in self._tickets if not ticket.follows]
            names = [name for name in every if name is not None]
            # The waiters first: a waiting thread starts no other, and a new one waits for the lock.
            waiters = set[int]().union(*(ticket.waiters for ticket in self._tickets))
            return HeldNames(
                (*names, None) if None in every else tuple(names),
                _are_all(waiters),
                front.gives_way,
                bool(front.waiters),
            )

    def end_waits(self, error: BaseException, of_all: bool) -> None:
        """Raises an error of the operation at the front also where this script waits for others."""
        with self._changed:
            front, *others = self._tickets
            ended = [ticket for ticket in others if of_all or ticket.waiters]
            if front.waiters and not of_all:
                return
            for ticket in ended:
                ticket.fail(error)
                if isinstance(ticket, Handle):
                    self._failed.add(ticket)
                    self._tickets.remove(ticket)
            if not front.waiters and not any(ticket.waiters for ticket in ended):
                self._unseen.set(error)
            self._changed.notify_all()

    def queue(self, work: Callable[[], Any], what: str, name: str | None = None) -> Handle:
        """Appends an operation. Does not block."""
        handle = Handle(work, what, name)
        handle.unseen = self._unseen
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{what} was queued after this rank had left the job")
            self._append(handle)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=OWN, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return handle

    def finish(self) -> None:
        """Waits until the operations in the queue have run."""
        self.run(lambda: None, None, follows=True)

    def drain(self) -> None:
        """Waits until all queued operations have run; logs the errors that nobody asked for."""
        self._unseen.forget()
        with contextlib.suppress(errors.KerasDistError):
            self.finish()
        for handle in list(self._failed):
            handle._log_error()

    def close(self) -> None:
        """Drains the queue and ends its thread."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def forget_refused(self, name: str) -> None:
        """Removes a name from `refused`."""
        with self._changed:
            self.refused -= {name}

    def _is_awaited(self) -> bool:
        """Returns whether a thread waits for an operation in the queue. Takes no lock."""
        return any(ticket.waiters for ticket in self._tickets.copy())

    def _serve(self) -> None:
        nap_unless(self._is_awaited)
        while (handle := self._next()) is not None:
            try:
                with self._lock:
                    if not handle._run():
                        self._failed.add(handle)
                self._remove(handle)
            except Reordered as other:
                self._move_to_front(other.name)
            del handle  # an error of a handle that was dropped is logged now, not one later

    def _next(self) -> Handle | None:
        """Waits for a handle at the front; returns `None` when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._handle_at_front() is not None)
            return self._handle_at_front()

    def _handle_at_front(self) -> Handle | None:
        front = self._tickets[0] if self._tickets else None
        return front if isinstance(front, Handle) else None

    def _add(self, ticket: Ticket) -> None:
        self._unseen.check()
        with self._changed:
            self._append(ticket)

    def _append(self, ticket: Ticket) -> None:
        names = {other.name for other in self._tickets if not other.done()}
        if ticket.name is not None and ticket.name in names:
            self._refused_in_flight |= {ticket.name}
            raise in_flight(self._where(), ticket.name)
        self._tickets.append(ticket)

    def _wait_for_turn(self, ticket: Ticket) -> None:
        """Waits until a ticket is at the front, and acquires the lock."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.error or self._tickets[0] is ticket)
        if ticket.error is not None:
            raise ticket.error
        self._lock.acquire()

    def _move_to_front(self, name: str | None) -> None:
        with self._changed:
            named = (ticket for ticket in self._tickets if ticket.name == name)
            chosen = next((ticket for ticket in named if not ticket.follows), None)
            if chosen is None:
                return  # its caller was interrupted; the next rendezvous tells the other ranks
            self._tickets.remove(chosen)
            self._tickets.appendleft(chosen)
            self._changed.notify_all()

    def _remove(self, ticket: Ticket) -> None:
        with self._changed:
            self._tickets.remove(ticket)
            ended = self._refused_in_flight & {ticket.name}
            self._refused_in_flight -= ended
            self.refused |= ended
            self._changed.notify_all()


def names_without_queue() -> HeldNames:
    """Returns what a rank without a queue holds: the operation of this thread, without a name."""
    return HeldNames((None,), _are_all({threading.get_ident()}), False, True)


def _are_all(waiters: set[int]) -> bool:
    """Returns whether each thread of the script waits, itself or for a framework that waits."""
    script = {
        thread.ident
        for thread in threading.enumerate()
        if not (thread.name.startswith(OWN) or is_foreign_thread(thread))
    }
    # A thread of a framework works for one of the script, which it does not name.
    return len(script - waiters) <= len(waiters - script)
