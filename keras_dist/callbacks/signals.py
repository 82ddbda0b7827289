"""The signals by which batch systems say that time is over, heard as soon as they come.

Python runs its handlers in the main thread, between two of its instructions. While that thread is
inside the framework a signal would wait for it, and so would the second one, which is to end the
process. So a thread of its own hears of them, through a pipe. Knows no ranks and no callbacks.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from keras_dist import _engine

__all__ = ["HEARD", "Signals"]

HEARD = (signal.SIGTERM, signal.SIGUSR1)
# A launcher and a batch system may send the same one to a process, one after the other.
ECHO_SECONDS = 2.0


class Signals:
    """Hears signals during a fit, where the script has no handlers of its own for them.

    The first is told; one that comes more than two seconds after it ends the process at once.
    Outside of a fit, as after one that ended by an exception, they do what they always do.

    Args:
        tell: is called once with the name of the signal, in another thread.
    """

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self._ours: list[signal.Signals] = []
        is_main = threading.current_thread() is threading.main_thread()
        self._depth = _engine.progress.progress().tasks.count("fit")
        if not is_main or not self._depth:
            return
        for earlier in _installed[::-1]:
            if earlier._depth >= self._depth:
                earlier.close()  # its fit has failed
        self._ours = [one for one in HEARD if signal.getsignal(one) is signal.SIG_DFL]
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for one in self._ours:
            signal.signal(one, self._in_main_thread)
        self._thread = threading.Thread(target=self._listen, name="keras_dist signals", daemon=True)
        self._thread.start()
        _installed.append(self)

    def close(self) -> None:
        """Gives the signals back. In the main thread; does nothing the second time."""
        if self not in _installed:
            return
        self.give_back()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def give_back(self) -> None:
        """Lets signals do what they did before, and leaves the thread alone."""
        _installed.remove(self)
        for one in self._ours:
            if signal.getsignal(one) == self._in_main_thread:  # or it is the script's since
                signal.signal(one, signal.SIG_DFL)
        now = signal.set_wakeup_fd(self._before)
        if now != self._write:
            signal.set_wakeup_fd(now)

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if not _engine.progress.is_during("fit"):
            self.close()
            signal.raise_signal(number)

    def _listen(self) -> None:
        first = None
        while (number := os.read(self._read, 1)[0]) != 0:
            if number not in self._ours or not _engine.progress.is_during("fit"):
                continue
            name, now = signal.Signals(number).name, time.monotonic()
            if first is None:
                first = now
                self._tell(name)
            elif now - first > ECHO_SECONDS:
                sys.stderr.write(f"keras_dist: {name} once more: this rank ends at once.\n")
                sys.stderr.flush()
                os._exit(128 + number)


_installed: list[Signals] = []


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)


def _go_on() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)


def _forget() -> None:
    for one in _installed[::-1]:
        one.give_back()
        _go_on()


def _if_installed(act: Callable[[], None]) -> Callable[[], None]:
    return lambda: act() if _installed else None


# A forked child, such as a worker that loads data, would write into the pipe of its parent. What
# comes for it before it has given the signals back waits.
os.register_at_fork(
    before=_if_installed(_hold),
    after_in_parent=_if_installed(_go_on),
    after_in_child=_forget,
)
