"""One run of a job: start it, forward signals, and leave no process behind.

Between two runs there are no ranks to forward signals to: they end the launcher with the exit code
of a preempted job.
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import FrameType
from typing import IO, Any

from keras_dist.runtime import exit_hooks

LOST_SECONDS = 5  # for mpiexec to end by itself after a host is lost, and after a signal
GRACE_SECONDS = 30  # after a signal; the default of Slurm before SIGKILL
KILL_SECONDS = 5  # a killed process may hang in the kernel
LAST_WORDS_SECONDS = 1
POLL_SECONDS = 0.5  # between looks for lost hosts
LOST_CODE = 1  # exit code of a job that has lost a host
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl, on Linux
SIGNAL_CODES = {
    signal.SIGTERM: exit_hooks.PREEMPTED_EXIT_CODE,
    signal.SIGUSR1: exit_hooks.PREEMPTED_EXIT_CODE,
    signal.SIGHUP: 128 + signal.SIGHUP,
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a job."""

    code: int
    signal: int | None
    timed_out: bool


def run_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float | None = None,
    output: IO[Any] | None = None,
    lost: Callable[[bool], Any] = lambda has_succeeded: False,
    follow: Callable[[threading.Event], Any] = threading.Event.is_set,
    process: "subprocess.Popen[bytes] | None" = None,
) -> Ended:
    """Runs a job to its end and forwards signals. No process of a failed job is left on this host.

    After a terminating signal the job has `GRACE_SECONDS`; Ctrl-C twice kills it at once. It has
    some `seconds` at most, or no limit. `lost` tells whether a host is lost; it is called with
    `True` when mpiexec has succeeded. `follow` runs in a thread, until its event is set.
    """
    job = _Job(process)
    _prctl(_SUBREAPER, 1)  # orphans of mpiexec become children of this process
    others = _children()
    previous = {number: signal.signal(number, job.pass_on) for number in _heard(PASSED_ON)}
    previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, job.expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds or 0)
        if job.process is None:
            # In a session of its own: this process forwards Ctrl-C.
            job.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        for number in job.signals:  # that arrived meanwhile
            job.process.send_signal(number)
        with _beside(lambda has_ended: job.end_without(lost, has_ended)), _beside(follow):
            code = job.process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if lost(code == 0):
            code = LOST_CODE if code <= 0 else code  # ended by this process, or 0 in error
        # Later signals belong to the caller, after the job is gone.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        if code != 0:
            kill_children(others)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    first = next((number for number in job.signals if number in ENDING), None)
    return Ended(code if code >= 0 else 128 - code, first, job.timed_out)


@contextlib.contextmanager
def _beside(work: Callable[[threading.Event], Any]) -> Iterator[None]:
    """Runs a function in a thread, with an event that is set at the end of the context."""
    has_ended = threading.Event()
    arguments = (has_ended,)
    thread = threading.Thread(target=work, args=arguments, name="keras_dist hosts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


class _Job:
    def __init__(self, process: "subprocess.Popen[bytes] | None") -> None:
        self.process = process
        self.signals: list[int] = []
        self.timed_out = False

    def end_without(self, lost: Callable[[bool], Any], has_ended: threading.Event) -> None:
        """Ends mpiexec if a host is lost, unless it ends by itself."""
        while not lost(False):
            if has_ended.wait(POLL_SECONDS):
                return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not has_ended.wait(LOST_SECONDS) and self.process is not None:
                self.process.send_signal(number)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in self.signals
        self.signals.append(number)
        if number in ENDING:
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL if again else number)

    def expire(self, number: int, frame: FrameType | None) -> None:
        if self.process is None or any(number in ENDING for number in self.signals):
            self.pass_on(signal.SIGKILL, frame)
        else:
            self.timed_out = True
            self.pass_on(signal.SIGTERM, frame)


def kill_children(others: Set[int] = frozenset()) -> None:
    """Kills all children of this thread, the main one, but others; also orphans of jobs."""
    begin, asked = time.monotonic(), set[int]()
    # Processes that forward output of ranks ignore SIGTERM: they end after its last line.
    while (pids := _children() - others) and time.monotonic() < begin + KILL_SECONDS:
        by_force = time.monotonic() > begin + LAST_WORDS_SECONDS
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if by_force or pid not in asked:
                    os.kill(pid, signal.SIGKILL if by_force else signal.SIGTERM)
                    asked.add(pid)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> set[int]:
    """Returns the child processes of this process; none without `/proc`."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return set(map(int, path.read_text().split())) if path.exists() else set()


def end_with_parent() -> None:
    """Requests SIGTERM at the death of the parent, on Linux. Runs in the child."""
    _prctl(_DEATH_SIGNAL, signal.SIGTERM)


# Loaded now: a forked child of a multithreaded process must not load anything.
_libc_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _prctl(option: int, value: int) -> None:
    if _libc_prctl is not None:
        _libc_prctl(option, value, 0, 0, 0)


def _heard(numbers: Iterable[int]) -> list[int]:
    """Returns signals without SIGHUP, if this process was started with it ignored: by nohup."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class EndRequested(BaseException):
    """Raised for a terminating signal; a `BaseException`, as `KeyboardInterrupt`."""

    def __init__(self, number: int):
        self.name = signal.Signals(number).name
        self.code = SIGNAL_CODES[signal.Signals(number)]


@contextlib.contextmanager
def terminating_signals_raise() -> Iterator[None]:
    """Makes terminating signals raise within the context; a running job has its own handlers."""
    previous = {number: signal.signal(number, _raise) for number in _heard(SIGNAL_CODES)}
    # Its default action would end the launcher, but only ranks use it.
    # Unlike `SIG_IGN`, a handler is not inherited by started programs.
    previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise EndRequested(number)
