"""The signals that ask a job to end with its state saved, received at once by a thread.

Python runs signal handlers in the main thread, between two instructions. While that thread is
inside the framework, a signal would wait, and so would a second one, which must end the process.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from keras_dist import _engine
from keras_dist.runtime.exit_hooks import ENDING_SIGNALS, HOSTS_CHANGED

# A launcher and a batch system may both send the same signal.
ECHO_SECONDS = 2.0


class Signals:
    """Receives signals during a task, unless the script has handlers for them.

    The first signal is reported; another one more than two seconds later ends the process, unless
    `keras-dist run` repeats that the hosts have changed. Outside of a fit, also after one that
    raised, signals have their default action.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        hosts: bool = False,
        is_active: Callable[[], bool] | None = None,
    ):
        self._report = report
        self._is_active = is_active or functools.partial(_engine.progress.is_during, "fit")
        self._ours: dict[int, Any] = {}
        is_main = threading.current_thread() is threading.main_thread()
        self._depth = _engine.progress.progress().tasks.count("fit")
        if not is_main or not self._is_active():
            return
        for earlier in _installed[::-1]:
            if earlier._depth >= self._depth:
                earlier.close()  # its fit has failed
        free = [each for each in ENDING_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
        self._ours = dict.fromkeys(free, signal.SIG_DFL)
        if hosts and signal.getsignal(HOSTS_CHANGED) is signal.SIG_IGN:
            self._ours[HOSTS_CHANGED] = signal.SIG_IGN
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for handled in self._ours:
            signal.signal(handled, self._in_main_thread)
        self._thread = threading.Thread(target=self._listen, name="keras_dist signals", daemon=True)
        self._thread.start()
        _installed.append(self)

    def close(self) -> None:
        """Restores the signals. In the main thread; a second call does nothing."""
        if self not in _installed:
            return
        self.restore()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def restore(self) -> None:
        """Restores the actions of the signals, without stopping the thread."""
        _installed.remove(self)
        for handled, action in self._ours.items():
            if signal.getsignal(handled) == self._in_main_thread:  # else the script has set one
                signal.signal(handled, action)
        now = signal.set_wakeup_fd(self._before)
        if now != self._write:
            signal.set_wakeup_fd(now)

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if not self._is_active():
            self.close()
            signal.raise_signal(number)

    def _listen(self) -> None:
        first = None
        while (number := os.read(self._read, 1)[0]) != 0:
            if number not in self._ours:
                self._forward(number)
                continue
            if not self._is_active():
                continue
            name, now = signal.Signals(number).name, time.monotonic()
            if first is None:
                first = now
                self._report(name)
            elif now - first > ECHO_SECONDS and self._ours[number] is signal.SIG_DFL:
                sys.stderr.write(f"keras_dist: {name} again: this rank ends now.\n")
                sys.stderr.flush()
                os._exit(128 + number)

    def _forward(self, number: int) -> None:
        """Wakes up whoever heard signals before, such as asyncio or the fit around this one."""
        if self._before != -1:
            with contextlib.suppress(OSError):  # it is full, as for the interpreter, or closed
                os.write(self._before, bytes([number]))


_installed: list[Signals] = []


def _mask(how: int) -> None:
    if _installed:
        signal.pthread_sigmask(how, ENDING_SIGNALS)


def _restore_in_child() -> None:
    for handled in _installed[::-1]:
        handled.restore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


# A forked child, such as a data loading worker, would write to the pipe of its parent. Signals are
# blocked until the child has restored them.
os.register_at_fork(
    before=functools.partial(_mask, signal.SIG_BLOCK),
    after_in_parent=functools.partial(_mask, signal.SIG_UNBLOCK),
    after_in_child=_restore_in_child,
)
