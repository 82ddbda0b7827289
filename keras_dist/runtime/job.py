"""The communicators of the job and of its process sets, by `init` or by the first use of ranks."""

import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from keras_dist import _engine, config, errors
from keras_dist.runtime import events, exit_hooks, startup
from keras_dist.runtime.process_set_table import ProcessSetTable
from keras_dist.runtime.process_sets import (
    ProcessSet,
    Ranks,
    check_process_set,
    check_process_sets,
    global_process_set,
    without_id,
)

_log = logging.getLogger("keras_dist")
_sets: ProcessSetTable | None = None  # with the communicator of all ranks
_detached: str | None = None  # why this process is not a rank any more
_connecting = threading.RLock()  # by several threads at once


def init(
    comm: Any | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Initializes keras_dist: connects the ranks, pins this rank's device and sizes thread pools.

    Call it once, at the top of the script and before the first model is built: the device and the
    thread pools cannot be changed after the framework has used them. A second call only adds
    `process_sets` that have no id yet. If it is not called, keras_dist initializes itself at the
    first use.

    Collective: every rank of the world, or of `comm`; `process_sets` must agree; blocks.

    Args:
        comm: the ranks that train together: an `mpi4py.MPI.Comm`, which is duplicated, or a
            list of ranks of the world. Defaults to the whole world.
        process_sets: list of `ProcessSet`, which get the ids 1, 2, ... in this order; or
            `"dynamic"`, which is accepted for compatibility with Horovod: sets can always be
            added later. After an error in them `init` may be called again. Defaults to no
            further set.

    Raises:
        LaunchError: the launcher announces more ranks than MPI sees, MPI does not allow calls
            from several threads, or this process is a child of a rank, forked or started by
            `multiprocessing`.
        ArgumentTypeError: `comm` is neither a communicator nor a list of ranks, or
            `process_sets` is not a list of `ProcessSet`; the latter is raised on every rank, as
            are the next two.
        ArgumentError: two process sets have the same ranks, or a set has a rank that does not
            exist.
        MismatchError: the ranks pass different process sets, run different versions of Python,
            keras_dist, Keras or the backend, or differ in `KERAS_DIST_*` variables that affect
            communication; raised on every rank.

    Example:
    ```python
    import keras_dist

    keras_dist.init()
    print(keras_dist.rank(), "of", keras_dist.size())
    ```
    """
    requested: Any = [] if process_sets is None or process_sets == "dynamic" else process_sets
    with _connecting:
        if _sets is None:
            _connect(comm, requested)
            return
    if new := without_id(requested):
        _sets.add(lambda: check_process_sets(new), "init")


def _connect(comm: Any, requested: Any) -> None:
    global _sets
    if _detached is not None:
        raise errors.LaunchError(
            "[keras_dist]",
            "the process that has called keras_dist.init, before the end of its script",
            _detached,
            "Use keras_dist in that process only, and pass its workers what they need, such "
            "as the rank, as arguments.",
        )
    _watch_forks()
    joined = startup.connect_ranks(comm)
    sets = ProcessSetTable(joined, comm if _engine.library.is_communicator(comm) else None)
    try:
        sets.add(lambda: check_process_sets(requested), "init")
    except errors.KerasDistError:
        sets.free()
        raise
    startup.take_device(joined)
    events.publish(events.JOB_INITIALIZED, joined)
    _sets = sets
    if joined.mpi is None and not config.settings().single_process:
        notify(
            f"keras_dist runs as one process: no MPI library was found "
            f"({_engine.library.mpi_failure()}). For several ranks install one, for example "
            f"with: pip install 'keras_dist[mpich]'"
        )
    if config.settings().on_failure != "stop":
        survive_rank_loss()
    events.publish(events.JOB_STARTED, joined)
    exit_hooks.register_job(lambda: [] if _sets is None else communicators(), detach)


def shutdown() -> None:
    """Leaves the job; a later `init` may join other ranks. Process sets lose their ids.

    Collective: every rank; blocks. Does nothing before `init`. MPI itself stays initialized.

    Raises:
        MismatchError: a rank does not call it, but something else; raised on every rank.
    """
    global _sets
    if _sets is not None:
        # What follows would wait for the others in silence. Ctrl-C may have ended an operation of
        # the ranks in the middle, so that they cannot meet again.
        if not isinstance(sys.exception(), KeyboardInterrupt):
            _engine.collectives.wait_for_end(communicators(), _engine.wait.SHUTDOWN)
        events.publish(events.JOB_ENDING, _sets.job)
        _sets.free()
        _sets = None


def detach(reason: str) -> None:
    """Detaches this process from the job, without notifying others; later uses are an error."""
    global _sets, _detached
    _sets, _detached = None, reason


def is_initialized() -> bool:
    """Returns whether keras_dist is initialized, by the user or by itself."""
    return _sets is not None


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Registers a process set, so that collectives can be called on it.

    Collective: every rank of the job, in the set or not; the ranks of the set must agree;
    blocks.

    Args:
        process_set: a `ProcessSet`, or a list of ranks.

    Returns:
        The set, with the lowest free id, the same on every rank.

    Raises:
        MismatchError: the ranks pass different sets; raised on every rank.
        ArgumentError: a set of the same ranks exists, or a rank does not exist in the job;
            raised on every rank.

    Example:
    ```python
    first = keras_dist.add_process_set([0])
    ```
    """

    def make_sets() -> list[ProcessSet]:
        given = process_set
        return [given if isinstance(given, ProcessSet) else ProcessSet(given)]

    return _process_sets().add(make_sets, "add_process_set")[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; a later set may get its id.

    Sets that were added together, from communicators of different ranks, are removed together.

    Collective: every rank of the job, in the set or not, with the same set; blocks.

    Args:
        process_set: the set.

    Returns:
        Whether the set was registered; `False` for `global_process_set`, which stays.

    Raises:
        MismatchError: the ranks pass different sets; raised on every rank.
        ArgumentTypeError: `process_set` is not a `ProcessSet`; raised on every rank.
    """
    return _process_sets().remove(process_set, "remove_process_set")


def communicator(process_set: ProcessSet | None = None) -> _engine.Communicator:
    """Returns the communicator of a process set; initializes keras_dist if needed."""
    job = _process_sets().job
    if process_set is None or process_set is global_process_set:
        return job
    return check_process_set(process_set, job.where())._communicator_in(job)


def communicators() -> list[_engine.Communicator]:
    """Returns the communicators that this rank belongs to: all ranks first, then process sets."""
    sets = _process_sets()
    return [sets.job, *sets.communicators()]


def includes_me(process_set: ProcessSet | None) -> bool:
    """Returns whether this rank is in a process set; `None` stands for all ranks."""
    if process_set is None:
        return True
    job = _process_sets().job
    check_process_set(process_set, job.where())._check(job)
    return bool(process_set.included())


def ranks_of(process_set: ProcessSet | None) -> tuple[Ranks, ...]:
    """Returns the ranks of a set and of the sets added together with it; `()` for all ranks."""
    if process_set is None or process_set is global_process_set:
        return ()
    return _process_sets().ranks_of_group(process_set)


def ranks_by_id(process_set_id: int) -> Ranks:
    """Returns the ranks of the process set with an id; id 0 is all ranks."""
    return _process_sets().ranks_by_id(process_set_id)


def find_process_set(group: Sequence[Ranks]) -> ProcessSet | None:
    """Returns the process set for which `ranks_of` returns `group`; `None` if there is none."""
    return _process_sets().find(group)


def can_survive_rank_loss() -> bool:
    """Returns whether MPI lets this rank continue when others die."""
    return communicator().size > 1 and _engine.library.survives_process_death()


def survive_rank_loss() -> None:
    """Makes this rank continue when others die, or rank 0 log a warning. Collective; blocks."""
    comm = communicator()
    if comm.size == 1 or comm.faults.retry is not None:
        return
    if _engine.library.survives_process_death():
        # If only some ranks did it, they would wait for the others after each operation.
        _engine.collectives.barrier(comm, operation="on_failure=continue")
        comm.faults.retry = _engine.Retry(comm)
        return
    library = _engine.library.version(comm.mpi)
    notify(
        "keras_dist cannot continue without a rank that dies: only Open MPI 5 or newer can, "
        f"started with: mpiexec --with-ft ulfm. This is {library}. The job ends "
        "when a rank dies; keras-dist run --max-restarts restarts it."
    )


def rank() -> int:
    """Returns the rank of this process, 0 to `size() - 1`."""
    return communicator().rank


def size() -> int:
    """Returns the number of ranks of the job."""
    return communicator().size


def local_rank() -> int:
    """Returns the rank of this process on its node, which selects its GPU."""
    return communicator().topology.local_rank


def local_size() -> int:
    """Returns the number of ranks on this node."""
    return communicator().topology.local_size


def cross_rank() -> int:
    """Returns the rank of this node among the nodes that have this local rank."""
    return communicator().topology.cross_rank


def cross_size() -> int:
    """Returns the number of nodes that have this local rank."""
    return communicator().topology.cross_size


def is_homogeneous() -> bool:
    """Returns whether every node has the same number of ranks."""
    return communicator().topology.is_homogeneous


def has_mpi() -> bool:
    """Returns whether this process can be a rank: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def where() -> str:
    """Returns the prefix of messages, such as `[rank 1 of 4]`."""
    return communicator().where() if has_mpi() else "[without MPI]"


def notify(*parts: str) -> None:
    """Logs a warning once for the job, on rank 0: a message, or its parts as of an error."""
    if rank() == 0:
        _log.warning(str(errors.KerasDistError(*parts)))


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_detach_child)


def _detach_child() -> None:
    global _connecting
    _connecting = threading.RLock()  # another thread may have held it
    detach(f"process {os.getpid()}, which was forked from it and is not a rank")
    _engine.tracing.forget_trace()


def _process_sets() -> ProcessSetTable:
    if _sets is None:
        init()
    if _sets is None:
        raise errors.LaunchError("keras_dist could not be initialized.")
    return _sets
