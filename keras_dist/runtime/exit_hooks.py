"""Exit hooks: all ranks end together, so that none waits for another. See decision 10."""

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

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL: the state was saved, a restart may resume
# From keras-dist run, which then makes it ignored in ranks: those that cannot save anything go on.
# Hydra passes on no other signal that a program may handle.
HOSTS_CHANGED = signal.SIGUSR1

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # from batch systems and launchers
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT  # as shells report it
STAGGER_SECONDS = 1.0  # between the MPI_Abort of one rank and that of the next
MAX_STAGGERED_RANKS = 3  # all further ranks abort at the same time
MPI_START_SECONDS = 5.0  # if MPI was not initialized before the failure
GRACE_SECONDS = 0.5  # an error raised on all ranks reaches them at about the same time

# Set by `register_job`.
_communicators: "Callable[[], list[Communicator]]" = list
_detach: Callable[[str], None] | None = None

# Raised on every rank by agreement.
COLLECTIVE_ERRORS = errors.MismatchError | errors.CallbackError | errors.CheckpointError


def register_job(
    communicators: "Callable[[], list[Communicator]]", detach: Callable[[str], None]
) -> None:
    """Registers the job that the hooks end, and installs the hooks."""
    global _communicators, _detach
    _communicators, _detach = communicators, detach
    install()


@functools.cache
def install() -> None:
    """Installs the exit hooks of this process. Further calls do nothing."""
    previous, pid = sys.excepthook, os.getpid()
    previous_thread_hook = threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid or _is_single_process():  # a forked child is not a rank
            previous(kind, error, trace)
            return
        _report("".join(traceback.format_exception(kind, error, trace)))
        has_sets = any(comm.subsets for comm in _communicators()[:1])
        if isinstance(error, COLLECTIVE_ERRORS) and not has_sets:
            return  # every rank raises the same error and exits by itself
        # The launcher kills the other ranks when one exits; let them print their error first.
        time.sleep(GRACE_SECONDS)
        if not isinstance(error, errors.LaunchError):  # MPI may be unusable then
            _abort(INTERRUPTED_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1)

    def thread_hook(failed: threading.ExceptHookArgs) -> None:
        # Only the thread ends, as without keras_dist; the report names the rank.
        if os.getpid() != pid or _is_single_process() or failed.exc_type is SystemExit:
            previous_thread_hook(failed)
            return
        name = failed.thread.name if failed.thread is not None else "unknown"
        text = traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
        _report(f"Exception in thread {name}:\n{''.join(text)}")

    sys.excepthook, threading.excepthook = hook, thread_hook
    atexit.register(_finalize, pid)


def _is_single_process() -> bool:
    comms = _communicators()
    return comms[0].size == 1 if comms else not launch_environment.starts_ranks()


def _report(text: str) -> None:
    """Prints a traceback, each line prefixed with the rank."""
    from keras_dist import _engine

    prefix, reason = "", None
    if comms := _communicators():
        _engine.tracing.flush_trace()
        prefix = f"[{comms[0].rank}] "
        reason = comms[0].faults.mismatch
    lines = text.splitlines(keepends=True)
    # Frameworks bury errors of the engine under their own tracebacks.
    if reason is not None and reason not in lines[-1]:
        lines.append(f"{reason}\n")
    sys.stderr.write("".join(prefix + line for line in lines))
    sys.stderr.flush()


def _finalize(pid: int) -> None:
    """Synchronizes with the other ranks at the end of the script, then finalizes MPI."""
    from keras_dist import _engine

    if os.getpid() != pid:  # a forked child
        return
    if comms := _communicators():
        _synchronize(comms)
        # Launchers such as srun end the other ranks once one has exited with a code other than 0:
        # that must not change the codes of those.
        for ending in ENDING_SIGNALS:
            if signal.getsignal(ending) is signal.SIG_DFL:
                signal.signal(ending, signal.SIG_IGN)
    _engine.library.stop_mpi()


def _synchronize(comms: "list[Communicator]") -> None:
    """Waits for the other ranks; aborts the job if they are in another collective."""
    from keras_dist import _engine

    if comms[0].mpi is not None and comms[0].mpi.Is_finalized():
        return
    try:
        _engine.collectives.wait_for_end(comms)
        comms[0].close_services()
        events.publish(events.JOB_ENDING, comms[0])
        if comms[0].size > 1 and _detach is not None:
            _detach("a call from an atexit handler, after the job has ended")
    except Exception as error:
        is_mismatch = isinstance(error, errors.MismatchError)
        _report(f"{error}\n" if is_mismatch else traceback.format_exc())
        time.sleep(GRACE_SECONDS)
        _abort(1)
    except KeyboardInterrupt:
        _report("KeyboardInterrupt while waiting for the other ranks at the end of the script\n")
        _abort(INTERRUPTED_EXIT_CODE)


def _abort(code: int) -> None:
    """Ends all ranks with `MPI_Abort`."""
    from keras_dist import _engine

    mpi = _engine.library.load_mpi()
    if mpi is not None:
        # `MPI_Init` returns once all ranks have called it, which some may never do. Python runs
        # no signal handler meanwhile: the default action ends this process, and so the job.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, MPI_START_SECONDS)
        _engine.library.start_mpi(mpi)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _engine.library.unlink_mpich_memory()
        if _engine.library.survives_process_death():
            # Open MPI's mpiexec was seen to hang, or to exit with 0, when several ranks abort at
            # the same time. One abort is enough.
            time.sleep(min(mpi.COMM_WORLD.Get_rank(), MAX_STAGGERED_RANKS) * STAGGER_SECONDS)
        mpi.COMM_WORLD.Abort(code)
        # MPICH's launcher ends this process some time after `Abort` returns. Until then it must
        # not reach the end of the script, where the other ranks would find a mismatch.
        os._exit(code)
