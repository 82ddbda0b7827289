"""One try of a job: started, told what this process is told, and nothing left of it."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

__all__ = ["Ended", "end_with_parent", "run_job"]

GRACE_SECONDS = 30  # to end after a signal: Slurm gives as much before it kills
KILL_SECONDS = 5  # a killed process may hang in the kernel
LAST_WORDS_SECONDS = 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl, on Linux


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended.

    Args:
        code: the exit code of mpiexec, by which shells know it.
        signal: the first signal by which it was asked to end, if there was one.
        timed_out: whether it took too long.
    """

    code: int
    signal: int | None
    timed_out: bool


def run_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float | None = None,
    output: IO[Any] | None = None,
) -> Ended:
    """Runs a job to its end, passing on signals. When it fails, no process of it is left here.

    A signal that asks to end gives it `GRACE_SECONDS`; Ctrl-C twice ends it at once.

    Args:
        command: mpiexec and all its words.
        environment: that of the ranks.
        seconds: how long it may take. Defaults to `None`, as long as it likes.
        output: a file for what it prints. Defaults to `None`, where this process prints.
    """
    return _Job().run(command, environment, seconds, output)


class _Job:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._timed_out = False

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        seconds: float | None,
        output: IO[Any] | None,
    ) -> Ended:
        _prctl(_SUBREAPER, 1)  # what mpiexec leaves behind becomes a child of this process
        others = _children()
        previous = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._expire)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds or 0)
            # A session of its own: Ctrl-C comes by way of this process alone.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            for number in self._signals:  # that came in between
                self._process.send_signal(number)
            code = self._process.wait()
            # What comes from now on is the caller's, when nothing is left of the job.
            signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
            if code != 0:
                _kill(lambda: _children() - others)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        first = next((number for number in self._signals if number in ENDING), None)
        return Ended(code if code >= 0 else 128 - code, first, self._timed_out)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in self._signals
        self._signals.append(number)
        if number in ENDING:
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL if again else number)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        if self._process is None or any(number in ENDING for number in self._signals):
            self._pass_on(signal.SIGKILL, frame)
        else:
            self._timed_out = True
            self._pass_on(signal.SIGTERM, frame)


def _kill(list_them: Callable[[], set[int]]) -> None:
    """Ends processes until there are none: who loses its parent turns up among them.

    Those that read what ranks print ignore SIGTERM: they end by themselves, behind the last line.
    """
    begin, asked = time.monotonic(), set[int]()
    while (pids := list_them()) and time.monotonic() < begin + KILL_SECONDS:
        by_force = time.monotonic() > begin + LAST_WORDS_SECONDS
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if by_force or pid not in asked:
                    os.kill(pid, signal.SIGKILL if by_force else signal.SIGTERM)
                    asked.add(pid)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> set[int]:
    """Returns the processes whose parent this one is; none where there is no `/proc`."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return set(map(int, path.read_text().split())) if path.exists() else set()


def end_with_parent() -> None:
    """Asks for SIGTERM when the parent of this process ends, on Linux; called in the child."""
    _prctl(_DEATH_SIGNAL, signal.SIGTERM)


# Found now: a child that a process of many threads has forked must not look for anything.
_libc_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _prctl(option: int, value: int) -> None:
    if _libc_prctl is not None:
        _libc_prctl(option, value, 0, 0, 0)
