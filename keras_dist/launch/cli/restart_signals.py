"""Between two tries of a job there are no ranks that a signal could be passed on to.

It ends the launcher, with the exit code by which a job says that another try may go on.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from keras_dist.runtime import exit_hooks

__all__ = ["EndRequested", "told_between_tries"]

CODES = {
    signal.SIGTERM: exit_hooks.PREEMPTED_EXIT_CODE,
    signal.SIGUSR1: exit_hooks.PREEMPTED_EXIT_CODE,
    signal.SIGHUP: 128 + signal.SIGHUP,
}


class EndRequested(BaseException):
    """A signal has come. As with an interrupt, no handler of errors is meant to catch it.

    Args:
        number: that of the signal.
    """

    def __init__(self, number: int):
        self.name = signal.Signals(number).name
        self.code = CODES[signal.Signals(number)]


@contextlib.contextmanager
def told_between_tries() -> Iterator[None]:
    """Within it signals that ask to end raise; a running job has handlers of its own.

    Raises:
        ToldToEnd: one has come.
    """
    previous = {number: signal.signal(number, _raise) for number in CODES}
    # Without an action of its own it would end the launcher; it means something to ranks alone.
    previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, _ignore)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise EndRequested(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing. Unlike `SIG_IGN` it is not handed on to the programs that are started."""
