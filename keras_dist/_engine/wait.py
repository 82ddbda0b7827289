"""Waiting for a number in shared memory to grow: spin briefly, then sleep in the kernel.

Spinning answers within a microsecond but keeps a core busy that another rank, or this
rank's own framework, may need; so it is short, and then the kernel wakes the waiter (a
futex: Linux on x86). Here is counted, too, how long this process has waited for
other ranks, whatever it waited by.
"""

import ctypes
import os
import time

import numpy as np

__all__ = ["Counter", "count_wait", "waited_seconds"]

SPIN_SECONDS = 30e-6
PATIENCE_SECONDS = 1.0  # a sleeper looks again now and then, whatever happened to its waker

# The system call has no wrapper in the C library.
_FUTEX = 202
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1  # the forms for words shared between processes


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_patience = ctypes.byref(_Timespec(int(PATIENCE_SECONDS), 0))
_syscall = ctypes.CDLL(None).syscall

# Two threads that add at once, on process sets of their own, may lose the time of one.
_waited_seconds = 0.0


def waited_seconds() -> float:
    """Returns how many seconds this process has waited for other ranks since it began."""
    return _waited_seconds


def count_wait(began: float) -> None:
    """Counts a wait that ends now.

    Args:
        began: `time.perf_counter()` when it began.
    """
    global _waited_seconds
    _waited_seconds += time.perf_counter() - began


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
        _syscall(_FUTEX, self._address, _WAKE, _EVERYONE, None, None, 0)

    def has_reached(self, value: int) -> bool:
        """Tells whether the number has reached `value`, both counted modulo 2**32."""
        return _reached(self._view[0], value)

    def wait_for(self, value: int) -> None:
        """Returns once the number has reached `value`, both counted modulo 2**32."""
        if _reached(self._view[0], value):
            return
        began = time.perf_counter()
        while not _reached(seen := self._view[0], value):
            if time.perf_counter() < began + SPIN_SECONDS:
                os.sched_yield()
            else:
                _syscall(_FUTEX, self._address, _WAIT, seen, _patience, None, 0)
        count_wait(began)


def _reached(seen: int, value: int) -> bool:
    return (seen - value) % 2**32 < 2**31
