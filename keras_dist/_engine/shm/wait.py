"""Waiting for a number in shared memory to grow: spin briefly, then sleep in the kernel.

Spinning answers within a microsecond but keeps a core busy that another rank, or this
rank's own framework, may need; so it is short, and then the kernel wakes the waiter (a
futex: Linux on x86). Here is noted, too, what each thread waits for, whatever it waits by, and
counted how long this process has waited for other ranks.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import numpy as np

__all__ = [
    "AT_THE_END",
    "PATIENCE_SECONDS",
    "Counter",
    "also_blocked",
    "blocked",
    "note",
    "noted",
    "waited_seconds",
    "waiting",
    "waits",
]

AT_THE_END = "the end of the script"  # what ranks wait in that have nothing more to do
SPIN_SECONDS = 30e-6
PATIENCE_SECONDS = 0.5  # a sleeper looks now and then whether the others are alive

# The system call has no wrapper in the C library.
_FUTEX = 202
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1  # the forms for words shared between processes


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_patience = ctypes.byref(_Timespec(0, int(PATIENCE_SECONDS * 1e9)))
_syscall = ctypes.CDLL(None).syscall

# Two threads that add at once, on process sets of their own, may lose the time of one.
_waited_seconds = 0.0

# By thread: the ranks it last met and what for; and since when it waits, if it does.
_last: dict[int, tuple[Sequence[int], Any]] = {}
_since: dict[int, float] = {}


def waited_seconds() -> float:
    """Returns how many seconds this process has waited for other ranks since it began."""
    return _waited_seconds


def note(ranks: Sequence[int], what: Any) -> None:
    """Notes what the calling thread does from now on; costs a store and nothing else.

    Args:
        ranks: with which ranks of the job.
        what: its `str` says it.
    """
    _last[get_ident()] = (ranks, what)


def noted() -> Any:
    """Returns what the calling thread has last noted that it does."""
    return _last.get(get_ident(), ((), ""))[1]


def waits() -> list[tuple[Sequence[int], Any, float]]:
    """Returns for which ranks threads of this process wait, in what, and since when.

    The time is one of `time.perf_counter()`.
    """
    return [(*_last.get(thread, ((), "")), began) for thread, began in list(_since.items())]


class _Blocked:
    """Notes, while it is entered, that the calling thread waits for other ranks."""

    def __enter__(self) -> None:
        _since[get_ident()] = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        _since.pop(get_ident(), None)


class _Waiting(_Blocked):
    """Counts the time as well."""

    def __exit__(self, *error: object) -> None:
        global _waited_seconds
        _waited_seconds += time.perf_counter() - _since.pop(get_ident())


blocked = _Blocked()
waiting = _Waiting()


def also_blocked() -> contextlib.AbstractContextManager[None]:
    """Returns `blocked`, or nothing where the calling thread is within a wait already."""
    return contextlib.nullcontext() if get_ident() in _since else blocked


class Counter:
    """A number that one process raises and others wait for.

    Args:
        word: uint32 array of shape (1,) in shared memory, alone on its cache line.
    """

    def __init__(self, word: np.ndarray):
        self._view = word.data
        self._address = ctypes.c_void_p(word.ctypes.data)

    def raise_to(self, value: int) -> None:
        """Sets the number and wakes who sleeps on it. Only its owner may call this.

        The kernel is entered even when nobody sleeps: it costs a microsecond, is a full
        memory barrier, and asking first would need one as well.
        """
        self._view[0] = value
        self.wake()

    def has_reached(self, value: int) -> bool:
        """Tells whether the number has reached `value`, both counted modulo 2**32."""
        return _reached(self._view[0], value)

    def wake(self) -> None:
        """Wakes who sleeps on the number; any process may call this."""
        _syscall(_FUTEX, self._address, _WAKE, _EVERYONE, None, None, 0)

    def wait_for(self, value: int, check: Callable[[], None]) -> None:
        """Returns once the number has reached `value`, both counted modulo 2**32.

        Args:
            value: the number to wait for.
            check: called now and then, and raises when there is no use in waiting on.
        """
        began = time.perf_counter()
        while not _reached(seen := self._view[0], value):
            if time.perf_counter() < began + SPIN_SECONDS:
                os.sched_yield()
            else:
                _syscall(_FUTEX, self._address, _WAIT, seen, _patience, None, 0)
                if not _reached(self._view[0], value):
                    check()


def _reached(seen: int, value: int) -> bool:
    return (seen - value) % 2**32 < 2**31
