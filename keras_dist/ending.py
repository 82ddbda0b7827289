"""How a job ends: all ranks together. No rank is left waiting for one that has gone.

A rank may go by an exception that nobody catches, or by reaching the end of the script,
`sys.exit` included, while others still call collectives. Under a launcher both are watched
from the moment keras_dist is imported.
"""

import atexit
import functools
import os
import sys
import time
import traceback
from types import TracebackType

from keras_dist import errors

__all__ = ["PREEMPTED_EXIT_CODE", "watch"]

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL: state was kept, another try may go on

GRACE_SECONDS = 0.5  # an error of all ranks reaches them at about the same time


@functools.cache
def watch() -> None:
    """Watches for the end of this process. Further calls do nothing."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _alone():
            previous(kind, error, trace)
            return
        _report("".join(traceback.format_exception(kind, error, trace)))
        if isinstance(error, errors.MismatchError | errors.CallbackError | errors.CheckpointError):
            return  # raised by agreement: it ends each rank by itself
        # A launcher ends the others as soon as one is gone; let them say the same first.
        time.sleep(GRACE_SECONDS)
        if not isinstance(error, errors.LaunchError):  # then MPI had better be left alone
            _end_all()

    sys.excepthook = hook
    atexit.register(_leave, os.getpid())


def _alone() -> bool:
    from keras_dist import launcher, runtime

    if runtime.is_initialized():
        return runtime.size() == 1
    announced = launcher.announced_size()
    return announced is None or announced.size == 1


def _report(text: str) -> None:
    """Prints the traceback with the rank before each line, and the reason once more.

    A framework wraps an error of the engine in pages of its own.
    """
    from keras_dist import runtime

    mark, reason = "", None
    if runtime.is_initialized():
        mark = f"[{runtime.rank()}] "
        reason = runtime.communicator().mismatch
    lines = text.splitlines(keepends=True)
    if reason is not None and reason not in lines[-1]:
        lines.append(f"{reason}\n")
    sys.stderr.write("".join(mark + line for line in lines))
    sys.stderr.flush()


def _leave(pid: int) -> None:
    """Meets the other ranks at the end of the script; ends the job when they are elsewhere."""
    from keras_dist import _engine, runtime

    # A forked child is no rank.
    if os.getpid() != pid or not runtime.is_initialized():
        return
    comms = runtime.communicators()
    if comms[0].mpi is not None and comms[0].mpi.Is_finalized():
        return
    try:
        _engine.at_the_end(comms)
    except errors.MismatchError as error:
        _report(f"{error}\n")
        time.sleep(GRACE_SECONDS)
        _end_all()


def _end_all() -> None:
    from keras_dist import _engine

    mpi = _engine.load_mpi()
    if mpi is not None:
        _engine.start_mpi(mpi)
        mpi.COMM_WORLD.Abort(1)
