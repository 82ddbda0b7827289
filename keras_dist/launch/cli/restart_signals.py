"""Signals between two runs of a job, when there are no ranks to forward them to.

Such a signal ends the launcher with the exit code of a preempted job.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from keras_dist.runtime import exit_hooks

CODES = {
    signal.SIGTERM: exit_hooks.PREEMPTED_EXIT_CODE,
    signal.SIGUSR1: exit_hooks.PREEMPTED_EXIT_CODE,
    signal.SIGHUP: 128 + signal.SIGHUP,
}


class EndRequested(BaseException):
    """Raised for a terminating signal; a `BaseException`, as `KeyboardInterrupt`."""

    def __init__(self, number: int):
        self.name = signal.Signals(number).name
        self.code = CODES[signal.Signals(number)]


@contextlib.contextmanager
def terminating_signals_raise() -> Iterator[None]:
    """Makes terminating signals raise within the context; a running job has its own handlers."""
    previous = {number: signal.signal(number, _raise) for number in CODES}
    # Its default action would end the launcher, but only ranks use it.
    previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, _ignore)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise EndRequested(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing. Unlike `SIG_IGN`, a handler is not inherited by started programs."""
