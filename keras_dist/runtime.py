"""Who am I: the ranks of this job, this rank's place among them, and its device.

Holds the one communicator of the process. Whoever asks for a rank or runs a collective
before `init` was called initialises keras_dist with its defaults. Knows how to tell a job
that was started wrongly; does not move data.
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from keras_dist import _backends, _engine, config, ending, errors, launcher

__all__ = [
    "bucket_nbytes",
    "communicator",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "notify",
    "rank",
    "shutdown",
    "size",
    "where",
]

_log = logging.getLogger("keras_dist")
_communicator: _engine.Communicator | None = None
_measured: tuple[_engine.Communicator, int] | None = None  # whose bucket size, and the size

USUAL_BUCKET_NBYTES = 25 * 2**20


def init(comm: Any | Sequence[int] | None = None) -> None:
    """Joins the ranks of the job and takes this rank's device and cores.

    Call it once, at the top of the script and before the first model is built: a device can
    be pinned and thread pools can be sized only before the framework has used them. A second
    call does nothing. Without it keras_dist initialises itself at the first use.

    Collective: every rank of the world, or of `comm`; blocks.

    Args:
        comm: the ranks that train together: an `mpi4py.MPI.Comm`, which is duplicated, or a
            list of ranks of the world. Defaults to the whole world.

    Raises:
        LaunchError: the launcher speaks of more ranks than MPI sees, or MPI does not allow
            calls from several threads.
        ArgumentTypeError: `comm` is neither a communicator nor a list of ranks.

    Example:
    ```python
    import keras_dist

    keras_dist.init()
    print(keras_dist.rank(), "of", keras_dist.size())
    ```
    """
    global _communicator
    if _communicator is not None:
        return
    alone = config.settings().single_process
    mpi = None if alone else _engine.load_mpi()
    if mpi is not None:
        _check_launcher(mpi)
        _engine.start_mpi(mpi)
    if comm is None and not alone:
        _check_ranks(mpi)
    joined = _engine.Communicator(mpi, _as_comm(mpi, comm), config.settings().reduce)
    _take_device(joined)
    _communicator = joined
    if mpi is None and not alone:
        notify(
            f"keras_dist runs as one process: no MPI library was found "
            f"({_engine.mpi_failure()}). For several ranks install one, for example "
            f"with: pip install 'keras_dist[mpich]'"
        )
    ending.watch()


def shutdown() -> None:
    """Leaves the ranks of the job; a later `init` may join others.

    Collective: every rank. MPI itself stays up until the process ends. Does nothing when
    keras_dist is not initialised.
    """
    global _communicator
    if _communicator is not None:
        _communicator.free()
        _communicator = None


def is_initialized() -> bool:
    """Tells whether `init` has been called, by the user or by keras_dist itself."""
    return _communicator is not None


def communicator() -> _engine.Communicator:
    """Returns the communicator, after initialising keras_dist when the user has not."""
    if _communicator is None:
        init()
    if _communicator is None:
        raise errors.LaunchError("keras_dist could not be initialised.")
    return _communicator


def bucket_nbytes(gradients_nbytes: int = 0) -> int:
    """Returns the size in bytes at which a bucket is closed.

    Collective when there are more gradients than one usual bucket holds: then the ranks
    measure, once, unless `KERAS_DIST_BUCKET_NBYTES` is set.

    Args:
        gradients_nbytes: how many bytes are to be cut into buckets, again and again; equal on
            all ranks. Defaults to 0, for what is reduced now and then.
    """
    global _measured
    comm = communicator()
    chosen = config.settings().bucket_nbytes
    if chosen or comm.size == 1 or gradients_nbytes <= USUAL_BUCKET_NBYTES:
        return chosen or USUAL_BUCKET_NBYTES
    if _measured is None or _measured[0] is not comm:
        nbytes, how = _engine.best_bucket_nbytes(comm)
        _measured = comm, nbytes
        if comm.rank == 0:
            _log.info("keras_dist sends gradients in buckets of %d MiB, %s", nbytes >> 20, how)
    return _measured[1]


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


def _as_comm(mpi: Any | None, comm: Any) -> Any | None:
    if comm is None:
        return None
    if mpi is not None and isinstance(comm, mpi.Comm):
        return comm
    if mpi is not None and isinstance(comm, Sequence) and all(isinstance(r, int) for r in comm):
        return _subset(mpi, list(comm))
    raise errors.ArgumentTypeError(
        errors.explain(
            "[keras_dist.init]",
            "comm to be an mpi4py.MPI.Comm or a list of ranks"
            + ("" if mpi is not None else ", with an MPI library installed"),
            repr(comm),
            "Leave it out to use all ranks.",
        )
    )


def _subset(mpi: Any, ranks: list[int]) -> Any:
    world = mpi.COMM_WORLD
    if world.rank not in ranks or not set(ranks) <= set(range(world.size)):
        raise errors.ArgumentError(
            errors.explain(
                f"[rank {world.rank} of {world.size}]",
                f"comm to list ranks between 0 and {world.size - 1}, this one among them",
                repr(ranks),
                "Only the ranks in the list may call init with it.",
            )
        )
    group = world.group.Incl(sorted(set(ranks)))
    return world.Create_group(group)


def _check_launcher(mpi: Any) -> None:
    """Finds the one wrong pair of launcher and library that MPI itself does not survive."""
    announced = launcher.announced_size()
    vendor = mpi.get_vendor()[0]
    if (
        announced is not None
        and announced.variable.startswith("OMPI_")
        and vendor not in ("Open MPI", "Spectrum MPI")
        and not mpi.Is_initialized()
    ):
        raise _not_together(announced, _engine.library(mpi))


def _check_ranks(mpi: Any | None) -> None:
    announced = launcher.announced_size()
    seen = 1 if mpi is None else mpi.COMM_WORLD.size
    if announced is not None and announced.size > seen == 1:
        found = (
            f"no MPI library at all ({_engine.mpi_failure()})"
            if mpi is None
            else f"1 process, by {_engine.library(mpi)}"
        )
        raise _not_together(announced, found)
    if mpi is not None and seen > 1 and mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise errors.LaunchError(
            errors.explain(
                "[keras_dist.init]",
                "MPI to allow calls from several threads (MPI_THREAD_SERIALIZED or more)",
                f"thread level {mpi.Query_thread()}",
                "Do not lower mpi4py.rc.thread_level, and let mpi4py initialise MPI.",
            )
        )


def _not_together(announced: launcher.Announcement, found: str) -> errors.LaunchError:
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    hint = f" (it may be {mpiexec})" if os.path.exists(mpiexec) else ""
    return errors.LaunchError(
        errors.explain(
            "[keras_dist.init]",
            f"{announced.size} ranks or more, as {announced.launcher} says ({announced.variable})",
            found,
            "The launcher and the MPI library of mpi4py do not belong together. Start the "
            f"job with the mpiexec of that library{hint}, or install the library that "
            "belongs to the launcher. To run one process on purpose set "
            "KERAS_DIST_SINGLE_PROCESS=1.",
        )
    )


def _take_device(comm: _engine.Communicator) -> None:
    backend = _backends.active()
    settings = config.settings()
    if settings.pin_device:
        trouble = backend.pin_device(comm.local_rank, comm.local_size)
        if trouble is not None:
            _log.warning("%s %s", comm.where(), trouble)
    if comm.size > 1 or settings.threads:
        # The size that was put into the environment at import was a guess, and no choice.
        backend.limit_threads(
            settings.threads or _cores_of_this_rank(comm),
            override=settings.threads > 0 or launcher.has_sized_threads(),
        )


def _cores_of_this_rank(comm: _engine.Communicator) -> int:
    """Returns this rank's share of the cores it may run on, at least 1.

    A core that several ranks of the node may use counts for each of them by its share, so
    bound and unbound ranks are both right.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // comm.local_size)
    mine = os.sched_getaffinity(0)
    places = _engine.allgather_object(comm, (os.uname().nodename, mine))
    share = sum(
        1 / sum(node == os.uname().nodename and core in cores for node, cores in places)
        for core in mine
    )
    return max(1, int(share + 1e-6))
