"""Who am I: the ranks of this job, this rank's place among them.

Holds the communicator of the job and those of its process sets. Whoever asks for a rank or
runs a collective before `init` was called initialises keras_dist with its defaults. How a job
is joined is `startup`'s; moves no data.
"""

import functools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from keras_dist import _engine, config, errors
from keras_dist.runtime import events, exit_hooks, startup
from keras_dist.runtime.process_set_table import SetTable
from keras_dist.runtime.process_sets import (
    ProcessSet,
    Ranks,
    as_set,
    check_list,
    global_process_set,
    without_id,
)

__all__ = [
    "add_process_set",
    "communicator",
    "communicators",
    "cross_rank",
    "cross_size",
    "find_process_set",
    "includes_me",
    "init",
    "is_homogeneous",
    "is_initialized",
    "leave",
    "local_rank",
    "local_size",
    "may_outlive_ranks",
    "notify",
    "outlive_ranks",
    "rank",
    "ranks_by_id",
    "ranks_of",
    "remove_process_set",
    "shutdown",
    "size",
    "where",
]

_log = logging.getLogger("keras_dist")
_sets: SetTable | None = None  # with the communicator of all ranks
_left: str | None = None  # how this process has ceased to be a rank, if it has


def init(
    comm: Any | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the ranks of the job and takes this rank's device and cores.

    Call it once, at the top of the script and before the first model is built: a device can
    be pinned and thread pools can be sized only before the framework has used them. A second
    call does nothing but add `process_sets` that have no id yet. Without it keras_dist
    initialises itself at the first use.

    Collective: every rank of the world, or of `comm`; `process_sets` must agree; blocks.

    Args:
        comm: the ranks that train together: an `mpi4py.MPI.Comm`, which is duplicated, or a
            list of ranks of the world. Defaults to the whole world.
        process_sets: list of `ProcessSet`, which get the ids 1, 2, ... in this order; or
            `"dynamic"`, which is accepted for the sake of scripts that know Horovod: sets can
            always be added later. After an error in them init may be called again. Defaults
            to no set but that of all ranks.

    Raises:
        LaunchError: the launcher speaks of more ranks than MPI sees, or MPI does not allow
            calls from several threads; or this is a child of a rank, made by a fork or by
            `multiprocessing`.
        ArgumentTypeError: `comm` is neither a communicator nor a list of ranks, or
            `process_sets` no list of `ProcessSet`; the latter is raised on every rank, as are
            the next two.
        ArgumentError: two process sets have the same ranks, or one has a rank that is not there.
        MismatchError: the ranks pass different process sets, run other versions of Python,
            keras_dist, Keras or the backend, or `KERAS_DIST_*` variables that decide how data
            travels are not set alike; raised on every rank.

    Example:
    ```python
    import keras_dist

    keras_dist.init()
    print(keras_dist.rank(), "of", keras_dist.size())
    ```
    """
    global _sets
    wanted: Any = [] if process_sets is None or process_sets == "dynamic" else process_sets
    if _sets is not None:
        if new := without_id(wanted):
            _sets.add(lambda: check_list(new), "init")
        return
    if _left is not None:
        raise errors.LaunchError(
            errors.explain(
                "[keras_dist]",
                "the process that has called keras_dist.init, before the end of its script",
                _left,
                "Use keras_dist in that process alone, and hand its workers what they need, such "
                "as the rank, as arguments.",
            )
        )
    _watch_forks()
    joined = startup.join_ranks(comm)
    sets = SetTable(joined, comm if _engine.is_communicator(comm) else None)
    try:
        sets.add(lambda: check_list(wanted), "init")
        startup.compare_versions(joined)
    except errors.KerasDistError:
        sets.free()
        raise
    startup.take_device(joined)
    events.publish(events.JOB_JOINED, joined)
    _sets = sets
    if joined.mpi is None and not config.settings().single_process:
        notify(
            f"keras_dist runs as one process: no MPI library was found "
            f"({_engine.mpi_failure()}). For several ranks install one, for example "
            f"with: pip install 'keras_dist[mpich]'"
        )
    if config.settings().on_failure == "continue":
        outlive_ranks()
    events.publish(events.JOB_STARTED, joined)
    exit_hooks.follow(_all_communicators, leave)


def shutdown() -> None:
    """Leaves the ranks of the job; a later `init` may join others. Process sets lose their ids.

    Collective: every rank. MPI itself stays up until the process ends. Does nothing when
    keras_dist is not initialised.
    """
    global _sets
    if _sets is not None:
        events.publish(events.JOB_ENDING, _sets.job)
        _sets.free()
        _sets = None


def leave(how: str) -> None:
    """Makes this process no rank any more, without a word to the others; any use is an error.

    Args:
        how: how it has come to that, for the message.
    """
    global _sets, _left
    _sets, _left = None, how


def is_initialized() -> bool:
    """Tells whether `init` has been called, by the user or by keras_dist itself."""
    return _sets is not None


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Makes a process set that collectives can be called on.

    Collective: every rank of the job, in the set or not; the ranks of the set must agree;
    blocks.

    Args:
        process_set: a `ProcessSet`, or what one can be made from: a list of ranks.

    Returns:
        The set, with an id: the lowest that is free, the same on every rank.

    Raises:
        MismatchError: the ranks pass different sets; raised on every rank.
        ArgumentError: there is a set of the same ranks, or it has ranks that the job has not;
            raised on every rank.

    Example:
    ```python
    first = keras_dist.add_process_set([0])
    ```
    """
    return _process_sets().add(lambda: [as_set(process_set)], "add_process_set")[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a process set's id away, which a later set may get.

    Sets that were made together, from communicators of different ranks, go together.

    Collective: every rank of the job, in the set or not, with the same set; blocks.

    Args:
        process_set: the set.

    Returns:
        Whether there was such a set; `False` for `global_process_set`, which stays.

    Raises:
        MismatchError: the ranks pass different sets; raised on every rank.
        ArgumentTypeError: it is no `ProcessSet`; raised on every rank.
    """
    return _process_sets().remove(process_set, "remove_process_set")


def communicator(process_set: ProcessSet | None = None) -> _engine.Communicator:
    """Returns the communicator, after initialising keras_dist when the user has not.

    Args:
        process_set: the set whose communicator it is. Defaults to that of all ranks.

    Raises:
        ArgumentTypeError: `process_set` is no `ProcessSet`.
        ArgumentError: it has no id, or this rank is not in it.
    """
    sets = _process_sets()
    return sets.job if process_set is None else sets.communicator(process_set)


def communicators() -> list[_engine.Communicator]:
    """Returns the communicators of all ranks and of every process set that this rank is in."""
    _process_sets()
    return _all_communicators()


def includes_me(process_set: ProcessSet | None) -> bool:
    """Tells whether this rank is in a process set; `None` is that of all ranks.

    Raises:
        ArgumentTypeError: `process_set` is no `ProcessSet`.
        ArgumentError: it has no id.
    """
    return process_set is None or _process_sets().includes_me(process_set)


def ranks_of(process_set: ProcessSet | None) -> tuple[Ranks, ...]:
    """Returns the ranks of a set and of those made together with it; none for all ranks."""
    if process_set is None or process_set is global_process_set:
        return ()
    return _process_sets().made_with(process_set)


def ranks_by_id(process_set_id: int) -> Ranks:
    """Returns the ranks of the process set with an id, 0 for that of all.

    Raises:
        ArgumentError: there is none.
    """
    return _process_sets().ranks_by_id(process_set_id)


def find_process_set(wanted: Sequence[Ranks]) -> ProcessSet | None:
    """Returns the set that this rank knows by what `ranks_of` has returned, if there is one."""
    return _process_sets().find(wanted)


def may_outlive_ranks() -> bool:
    """Tells whether this rank could go on when others die: whether MPI allows it."""
    return communicator().size > 1 and _engine.outlives_processes()


def outlive_ranks() -> None:
    """Makes this rank go on when others die, where MPI allows it; else the root says so.

    Collective: every rank of the job; blocks where MPI allows it.

    Raises:
        MismatchError: another rank does something else; raised on every rank.
    """
    comm = communicator()
    if comm.size == 1 or comm.recovery is not None:
        return
    if _engine.outlives_processes():
        # A rank that alone were ready for deaths would wait for the others behind each operation.
        _engine.barrier(comm, operation="on_failure=continue")
        comm.recovery = _engine.Retry(comm)
        return
    notify(
        "keras_dist cannot go on without a rank that dies: only Open MPI 5 or newer can, started "
        f"with: mpiexec --with-ft ulfm. This is {_engine.library(comm.mpi)}. The job ends then; "
        "keras-dist run --max-restarts starts it anew."
    )


def rank() -> int:
    """Returns the number of this process among all, 0 to `size() - 1`."""
    return communicator().rank


def size() -> int:
    """Returns the number of processes that train together."""
    return communicator().size


def local_rank() -> int:
    """Returns the number of this process among those on its node: the GPU it takes."""
    return communicator().local_rank


def local_size() -> int:
    """Returns the number of processes on this node."""
    return communicator().local_size


def cross_rank() -> int:
    """Returns the number of this node among those that have a rank of this local rank."""
    return communicator().cross_rank


def cross_size() -> int:
    """Returns the number of nodes that have a rank of this local rank."""
    return communicator().cross_size


def is_homogeneous() -> bool:
    """Tells whether every node has the same number of ranks."""
    return communicator().is_homogeneous


def where() -> str:
    """Returns the place of this rank for messages, such as `[rank 1 of 4]`."""
    return communicator().where()


def notify(message: str) -> None:
    """Tells the user something, once for the job: only rank 0 logs it, as a warning."""
    if rank() == 0:
        _log.warning(message)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_be_no_rank)


def _be_no_rank() -> None:
    leave(f"process {os.getpid()}, which was forked from it and is no rank")
    _engine.forget_trace()


def _all_communicators() -> list[_engine.Communicator]:
    return [] if _sets is None else [_sets.job, *_sets.communicators()]


def _process_sets() -> SetTable:
    if _sets is None:
        init()
    if _sets is None:
        raise errors.LaunchError("keras_dist could not be initialised.")
    return _sets
