"""How a job ends: all ranks together. No rank is left waiting for one that has gone.

A rank may go by an exception that nobody catches, or by reaching the end of the script,
`sys.exit` included, while others still call collectives. Under a launcher both are watched
from the moment keras_dist is imported.
"""

import atexit
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from keras_dist import errors
from keras_dist.runtime import events, launch_environment

if TYPE_CHECKING:
    from keras_dist._engine import Communicator

__all__ = ["PREEMPTED_EXIT_CODE", "follow", "watch"]

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL: state was kept, another try may go on

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT  # as a shell says it
STAGGER_SECONDS = 1.0  # from one rank that ends the job to the next that does, if it still lives
MOST_STAGGERED = 3  # ranks; those after them come at the same time
START_SECONDS = 5.0  # for MPI, where this rank has not used it before it failed
GRACE_SECONDS = 0.5  # an error of all ranks reaches them at about the same time

# What `runtime.job` knows, once it has joined one.
_communicators: "Callable[[], list[Communicator]]" = list
_leave_job: Callable[[str], None] | None = None

AGREED = errors.MismatchError | errors.CallbackError | errors.CheckpointError


def follow(communicators: "Callable[[], list[Communicator]]", leave: Callable[[str], None]) -> None:
    """Names the job that the hooks end, and watches for the end of this process.

    Args:
        communicators: returns the communicators of the job, that of all ranks first; none where
            this process is in no job.
        leave: detaches this process from the job; is given the reason for messages.
    """
    global _communicators, _leave_job
    _communicators, _leave_job = communicators, leave
    watch()


@functools.cache
def watch() -> None:
    """Watches for the end of this process. Further calls do nothing."""
    previous, pid = sys.excepthook, os.getpid()
    of_threads = threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid or _alone():  # a forked child is no rank
            previous(kind, error, trace)
            return
        _report("".join(traceback.format_exception(kind, error, trace)))
        if isinstance(error, AGREED) and _has_no_sets():
            return  # raised by agreement: it ends each rank by itself
        # A launcher ends the others as soon as one is gone; let them say the same first.
        time.sleep(GRACE_SECONDS)
        if not isinstance(error, errors.LaunchError):  # then MPI had better be left alone
            _end_all(INTERRUPTED_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1)

    def thread_hook(failed: threading.ExceptHookArgs) -> None:
        # As in one process a thread ends alone; but which rank's it was must be told.
        if os.getpid() != pid or _alone() or failed.exc_type is SystemExit:
            of_threads(failed)
            return
        name = failed.thread.name if failed.thread is not None else "unknown"
        text = traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
        _report(f"Exception in thread {name}:\n{''.join(text)}")

    sys.excepthook, threading.excepthook = hook, thread_hook
    atexit.register(_leave, pid)


def _alone() -> bool:
    comms = _communicators()
    return comms[0].size == 1 if comms else not launch_environment.starts_ranks()


def _has_no_sets() -> bool:
    """Tells whether all ranks agree upon what is agreed, and not those of a process set alone."""
    comms = _communicators()
    return not comms or not comms[0].subsets


def _report(text: str) -> None:
    """Prints the traceback with the rank before each line, and the reason once more.

    A framework wraps an error of the engine in pages of its own.
    """
    from keras_dist import _engine

    mark, reason = "", None
    if comms := _communicators():
        _engine.flush_trace()
        mark = f"[{comms[0].rank}] "
        reason = comms[0].mismatch
    lines = text.splitlines(keepends=True)
    if reason is not None and reason not in lines[-1]:
        lines.append(f"{reason}\n")
    sys.stderr.write("".join(mark + line for line in lines))
    sys.stderr.flush()


def _leave(pid: int) -> None:
    """Leaves MPI at the end of the script, after the last meeting where there are other ranks."""
    from keras_dist import _engine

    if os.getpid() != pid:  # a forked child
        return
    if comms := _communicators():
        _meet(comms)
    _engine.stop_mpi()


def _meet(comms: "list[Communicator]") -> None:
    """Meets the other ranks; ends the job when they are elsewhere."""
    from keras_dist import _engine

    if comms[0].mpi is not None and comms[0].mpi.Is_finalized():
        return
    try:
        _engine.at_the_end(comms)
        events.publish(events.JOB_ENDING, comms[0])
        if comms[0].size > 1 and _leave_job is not None:
            _leave_job("a call from a handler of atexit, when the ranks had met and left")
    except errors.MismatchError as error:
        _report(f"{error}\n")
        time.sleep(GRACE_SECONDS)
        _end_all(1)
    except Exception:
        _report(traceback.format_exc())
        time.sleep(GRACE_SECONDS)
        _end_all(1)
    except KeyboardInterrupt:
        _report("KeyboardInterrupt while waiting for the other ranks at the end of the script\n")
        _end_all(INTERRUPTED_EXIT_CODE)


def _end_all(code: int) -> None:
    from keras_dist import _engine

    mpi = _engine.load_mpi()
    if mpi is not None:
        # MPI starts when all ranks have come to that, and some may never. No handler could run
        # meanwhile: the signal itself ends this process, and that ends the job.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
        _engine.start_mpi(mpi)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _engine.take_names_away()
        if _engine.outlives_processes():
            # Where several ranks end a job at once, Open MPI's mpiexec was seen to stay, or to end
            # with 0. The first one is enough.
            place = min(mpi.COMM_WORLD.Get_rank(), MOST_STAGGERED)
            time.sleep(place * STAGGER_SECONDS)
        mpi.COMM_WORLD.Abort(code)
