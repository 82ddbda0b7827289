"""`run`: a training function that goes on after the ranks have changed, and the state it takes."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_dist import _engine, errors, runtime
from keras_dist.runtime import exit_hooks
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


class State:
    """Base class of states: `ObjectState`, `KerasState`, `TorchState`.

    A custom class defines `save`, `restore` and `sync`, and `reset` if needed.

    Args:
        bcast_object: accepted for scripts of Horovod; ignored.
        get_rank: accepted for scripts of Horovod; ignored.
    """

    #: The signals that this rank has received, while `run` calls a function; else `None`.
    _signals: list[str] | None = None
    #: Whether `sync` has found a commit of an earlier start of the job.
    _is_found = False

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._losses = runtime.communicator().faults.losses

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions without arguments to call when the ranks have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset`, then the reset callbacks, in their order."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and checks whether the ranks or the hosts have changed.

        A full disk does not end the training, nor does any failure to write after the first
        successful commit: rank 0 logs a warning, and the existing files stay.

        Collective: every rank; blocks in a function of `run`, or if there is a directory.

        Raises:
            HostsUpdatedInterrupt: ranks have died since the last commit; raised on every rank.
            SystemExit: as for `check_host_updates`.
            CheckpointError: no commit could be written to the directory; raised on every rank.
        """
        self.save()
        self._follow(self._changes())

    def check_host_updates(self) -> None:
        """Checks whether ranks have died since the last check, or the hosts have changed.

        Collective: every rank; blocks in a function of `run`.

        Raises:
            HostsUpdatedInterrupt: ranks have died; raised on every rank.
            SystemExit: a rank was asked to stop, for example because the hosts have changed; the
                state is saved, and the exit code is 75. Raised on every rank.
        """
        changes = self._changes()
        if any(signals for _, signals in changes):
            self.save()
        self._follow(changes)

    def _changes(self) -> list[tuple[int, list[str]]]:
        """Returns, for each rank, how many have died since the last check, and its signals."""
        comm = runtime.communicator()
        if comm.faults.retry is None and self._signals is None:
            return []
        # Ranks may notice a death at different times; the gathered values are the same on all.
        mine = comm.faults.losses - self._losses, self._signals or []
        found = _engine.collectives.allgather_object(
            comm, mine, operation="the check whether ranks have died"
        )
        self._losses = comm.faults.losses
        return found

    def _follow(self, changes: list[tuple[int, list[str]]]) -> None:
        if asked := [signal for _, signals in changes for signal in signals]:
            code = exit_hooks.PREEMPTED_EXIT_CODE
            runtime.notify(
                f"keras_dist: {', '.join(dict.fromkeys(asked))}: all {runtime.size()} ranks stop "
                f"after a commit. {self._how_to_go_on()} Exit code {code}."
            )
            sys.exit(code)
        if any(losses for losses, _ in changes):
            text = f"{runtime.where()} Ranks have died; {runtime.size()} continue."
            raise HostsUpdatedInterrupt(text=text)

    def _how_to_go_on(self) -> str:
        return "Start the job again to go on from it."

    def _outlives_ranks(self) -> bool:
        """Returns whether a job that is started again finds the last commit."""
        return False

    def _forget(self) -> None:
        """Drops what is kept for a further start of the job: the function of `run` has ended."""

    def reset(self) -> None:
        """Does nothing. A custom class may adapt to the current ranks here."""

    def save(self) -> None:
        """Saves the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0. Collective: every rank; blocks."""
        raise NotImplementedError


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
        if state._is_found:
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
    """Returns whether all ranks are alive and restore the last commit. Collective; blocks."""
    # State of a dead rank alone, such as a stage of a pipeline, cannot be restored.
    comm = runtime.communicator()
    if comm.subsets:
        return False  # ranks of a set might wait for this one and never arrive
    if not all(map(comm.is_alive, comm.ranks)):
        return False  # the error ends the job, also while others wait for the dead rank
    losses = comm.faults.losses
    _engine.collectives.barrier(comm, operation="the return to the last commit")
    return comm.faults.losses == losses
