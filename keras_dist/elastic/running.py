"""`run`: a training function that is called again, where ranks have died or all want to go back."""

import functools
from collections.abc import Callable
from typing import Any

from keras_dist import _engine, errors, runtime

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "run"]

HorovodInternalError = errors.RankLostError


class HostsUpdatedInterrupt(errors.KerasDistError, RuntimeError):
    """The ranks are others than before: raised on every rank by `State.check_host_updates`.

    Args:
        skip_sync: whether `run` calls the function again with the state of each rank as it is.
            Defaults to `False`: with that of the root.
        text: what it says. Defaults to nothing.
    """

    def __init__(self, skip_sync: bool = False, text: str = ""):
        super().__init__(skip_sync, text)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return str(self.args[1])


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a training function one that goes on when ranks die.

    The function begins with the state that was committed last: that of a directory, when the job
    was started anew, else that of the root. Where MPI allows it (Open MPI 5, `mpiexec --with-ft
    ulfm`) the other ranks finish the collective in which one died, with nothing lost; at the next
    commit the reset callbacks of the state are called and the function is called again, so it can
    share data out anew. Where the ranks cannot go on the error ends the job, and
    `keras-dist run --max-restarts` starts it anew.

    Where all ranks live, and the function raises `HorovodInternalError` on all of them, as a script
    does that has seen a loss that is no number, all go back to the last commit, the reset callbacks
    are called and the function again, as often as it raises it. Where it does on some ranks alone,
    while others go on, all raise a `MismatchError`, and none is left waiting. In a job with process
    sets, in which others may wait for each other, the error ends the job.

    Collective: every rank.

    Args:
        function: takes a `State` and further arguments.

    Returns:
        The function to call, with the same arguments; it returns what `function` does.
    """

    @functools.wraps(function)
    def elastic(state: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.may_outlive_ranks():
            runtime.outlive_ranks()
        state.sync()
        while True:
            try:
                return function(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                state.on_reset()
                if not interrupt.skip_sync:
                    state.sync()
            except HorovodInternalError:
                if not _all_go_back():
                    raise
                state.restore()
                state.on_reset()
                state.sync()

    return elastic


def _all_go_back() -> bool:
    """Tells whether all ranks live, when they have come here.

    What a rank had that has died by itself, such as a stage of a pipeline, nobody can go back to.

    Collective: every rank; blocks.

    Raises:
        MismatchError: others do something else; raised on every rank.
    """
    comm = runtime.communicator()
    if comm.subsets:
        return False  # in one of them ranks might wait for this one, and never come here
    if not all(map(comm.is_alive, comm.ranks)):
        return False  # the error ends the job, also where others still wait for the dead
    losses = comm.faults.losses
    _engine.collectives.barrier(comm, operation="going back to the last commit")
    return comm.faults.losses == losses
