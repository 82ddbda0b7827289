"""`run`: a training function that goes on after the ranks have changed."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist import _engine, errors, runtime
from keras_dist.runtime.signals import Signals

HorovodInternalError = errors.RankLostError


class HostsUpdatedInterrupt(errors.KerasDistError, RuntimeError):
    """The ranks have changed; raised on every rank by `State.check_host_updates`.

    Args:
        skip_sync: whether `run` calls the function again without a broadcast of the state of
            rank 0. Defaults to `False`.
        text: the message. Defaults to an empty one.
    """

    def __init__(self, skip_sync: bool = False, text: str = ""):
        super().__init__(text)
        self.args = (skip_sync, text)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return str(self.args[1])


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: makes a training function go on when ranks die, and with other hosts.

    The function starts with the last committed state if the job has been started again, otherwise
    with that of rank 0. There are two ways to go on:

    - If MPI allows it (Open MPI 5, `mpiexec --with-ft ulfm`), the other ranks complete the
      collective in which a rank died, and nothing is lost. At the next commit the reset callbacks
      of the state are called, and the function is called again: it can shard its data over the
      remaining ranks.
    - Otherwise `keras-dist run --max-restarts` starts the job again, from the last commit. If the
      hosts change (`--host-discovery-script` with `--min-np` or `--max-np`), or a batch system
      sends SIGTERM or SIGUSR1, all ranks end at the next commit with exit code 75; for other hosts
      `keras-dist run` starts the job again at once. Whenever an earlier commit is read, the reset
      callbacks are called, as the number of ranks may be another one.

    If all ranks are alive and the function raises `HorovodInternalError` on all of them, for
    example after a loss that is not a number, all restore the last commit, the reset callbacks are
    called, and the function is called again. If it raises on some ranks only, all ranks raise a
    `MismatchError`. In a job with process sets the error ends the job, as ranks of a set may wait
    for each other.

    Collective: every rank.

    Args:
        function: takes a `State` and further arguments.

    Returns:
        Function with the same arguments and result.
    """

    @functools.wraps(function)
    def elastic(state: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.can_survive_rank_loss():
            runtime.survive_rank_loss()
        state.sync()
        if state._is_from_earlier_start():
            state.on_reset()
            state.sync()
        with _listening(state):
            result = _run(function, state, *args, **kwargs)
        state._forget()
        return result

    return elastic


def _run(function: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
    while True:
        try:
            return function(state, *args, **kwargs)
        except HostsUpdatedInterrupt as interrupt:
            state.on_reset()
            if not interrupt.skip_sync:
                state.sync()
        except HorovodInternalError:
            if not _all_restore():
                raise
            state.restore()
            state.on_reset()
            state.sync()


@contextlib.contextmanager
def _listening(state: Any) -> Iterator[None]:
    """Lets a state hear of signals, if a commit outlives the ranks."""
    if not state._outlives_ranks():
        yield
        return
    state._signals = []
    listener = Signals(
        lambda name: state._signals.append(f"{name} on rank {runtime.rank()}"), True, lambda: True
    )
    try:
        yield
    finally:
        listener.close()
        state._signals = None


def _all_restore() -> bool:
    """Returns whether all ranks are alive and restore the last commit.

    State of a dead rank alone, such as a stage of a pipeline, cannot be restored.

    Collective: every rank; blocks.
    """
    comm = runtime.communicator()
    if comm.subsets:
        return False  # ranks of a set might wait for this one and never arrive
    if not all(map(comm.is_alive, comm.ranks)):
        return False  # the error ends the job, also while others wait for the dead rank
    losses = comm.faults.losses
    _engine.collectives.barrier(comm, operation="the return to the last commit")
    return comm.faults.losses == losses
