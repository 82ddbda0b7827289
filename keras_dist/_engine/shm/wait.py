"""Waits: counters in shared memory, and a record of what each thread waits for.

A thread that waits for a counter spins briefly and then sleeps in the kernel, which wakes it (a
futex, on Linux). Spinning reacts within a microsecond but keeps a core busy that another rank, or
the framework of this one, may need.
"""

import contextlib
import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import numpy as np

AT_THE_END = "the end of the script"  # the operation of ranks that have nothing more to do
SHUTDOWN = "shutdown"
LAST = (AT_THE_END, SHUTDOWN)  # operations in which ranks wait for others that may still work
SPIN_SECONDS = 30e-6
NAP_SECONDS = 100e-6
# A core is crowded, for a while, after a thread that yielded has had it back only after so long.
TAKEN_SECONDS, CROWDED_SECONDS, CROWDED_NAP_SECONDS = 30e-6, 5e-3, 50e-6
IDLE_POLLS = 4  # in a row, before a thread naps on a crowded core
PATIENCE_SECONDS = 0.5  # a sleeping thread checks this often whether the others are alive

# The number of the system call, for which the C library has no wrapper.
_NUMBERS = {"x86_64": 202, "aarch64": 98} if sys.platform == "linux" else {}
_FUTEX = _NUMBERS.get(platform.machine(), 0)
CAN_SLEEP = _FUTEX > 0
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1  # operations on words that processes share


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_patience = ctypes.byref(_Timespec(0, int(PATIENCE_SECONDS * 1e9)))
_syscall = ctypes.CDLL(None).syscall

# If two threads add at once, the time of one may be lost.
_waited_seconds = 0.0
_crowded_until = 0.0  # of any thread; a time of `time.perf_counter()`


class _Pace(threading.local):
    """For each thread, what tells whether somebody waits for it; `None`: it waits itself."""

    is_awaited: Callable[[], bool] | None = None


_pace = _Pace()

# By thread: its last ranks and operation; and since when it waits, if it does.
_last: dict[int, tuple[Sequence[int], Any]] = {}
_since: dict[int, float] = {}


def waited_seconds() -> float:
    """Returns the seconds that this process has waited for other ranks since it started."""
    return _waited_seconds


def nap_unless(is_awaited: Callable[[], bool]) -> None:
    """Makes `pause` nap in the calling thread, except while somebody waits for what it does."""
    _pace.is_awaited = is_awaited


def pause(idle_polls: int = 0) -> None:
    """Lets other threads run before the next poll of what this one waits for."""
    # Data moves only while MPI is called, so that sleeping over TCP took several times as long as
    # yielding the core. If the core is crowded, as on a host with more ranks than cores, this naps
    # while no data moves, because its polls would take time from ranks at work.
    global _crowded_until
    # The thread of a queued operation runs beside the computation of its own rank, so its core is
    # always crowded: it polls if somebody waits for it, and naps if not.
    if _pace.is_awaited is not None:
        if _pace.is_awaited():
            os.sched_yield()
        else:
            time.sleep(NAP_SECONDS)
        return
    start = time.perf_counter()
    if idle_polls > IDLE_POLLS and start < _crowded_until:
        time.sleep(CROWDED_NAP_SECONDS)
        return
    os.sched_yield()
    end = time.perf_counter()
    if end - start > TAKEN_SECONDS:
        _crowded_until = end + CROWDED_SECONDS


def note(ranks: Sequence[int], what: Any) -> None:
    """Records the operation of the calling thread. It costs one store."""
    _last[get_ident()] = (ranks, what)


def noted() -> Any:
    """Returns the last operation of the calling thread."""
    return _last.get(get_ident(), ((), ""))[1]


def waits() -> list[tuple[Sequence[int], Any, float]]:
    """Returns ranks, operation and start, by `perf_counter`, of every wait of this process."""
    return [(*_last.get(thread, ((), "")), began) for thread, began in list(_since.items())]


class _Blocked:
    """Records that the calling thread waits for other ranks."""

    def __enter__(self) -> None:
        _since[get_ident()] = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        _since.pop(get_ident(), None)


class _Waiting(_Blocked):
    """Records the wait and adds up its time."""

    def __exit__(self, *error: object) -> None:
        global _waited_seconds
        _waited_seconds += time.perf_counter() - _since.pop(get_ident())


blocked = _Blocked()
waiting = _Waiting()


def also_blocked() -> contextlib.AbstractContextManager[None]:
    """Returns `blocked`, or a null context if the calling thread already waits."""
    return contextlib.nullcontext() if get_ident() in _since else blocked


class Counter:
    """A counter on a cache line of its own, which one process increases and others wait for."""

    def __init__(self, word: np.ndarray, fence: Callable[[], None] | None = None):
        self.view = word.data
        self._fence = fence
        self._address = ctypes.c_void_p(word.ctypes.data)

    def raise_to(self, value: int) -> None:
        """Sets the counter and wakes threads that sleep on it. Only its owner may call this."""
        if self._fence is not None:
            self._fence()
        self.view[0] = value
        # Even if no thread sleeps: the call takes a microsecond and is a full memory barrier, which
        # a check would need as well.
        _syscall(_FUTEX, self._address, _WAKE, _EVERYONE, None, None, 0)

    def has_reached(self, value: int) -> bool:
        """Returns whether the counter has reached `value`; both are modulo 2**32."""
        return _reached(self.view[0], value)

    def wake(self) -> None:
        """Wakes threads that sleep on the counter; any process may call this."""
        _syscall(_FUTEX, self._address, _WAKE, _EVERYONE, None, None, 0)

    def wait_for(self, value: int, check: Callable[[], None]) -> None:
        """Waits until the counter has reached `value`; both are modulo 2**32."""
        view, end = self.view, time.perf_counter() + SPIN_SECONDS
        while ((seen := view[0]) - value) % 2**32 >= 2**31:  # `has_reached`, in line
            if time.perf_counter() < end:
                os.sched_yield()
            else:
                _syscall(_FUTEX, self._address, _WAIT, seen, _patience, None, 0)
                if not _reached(view[0], value):
                    check()


def _reached(seen: int, value: int) -> bool:
    return (seen - value) % 2**32 < 2**31
