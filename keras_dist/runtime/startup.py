"""How a job is joined: is it started rightly, and what of the node is this rank's.

MPI itself is the truth; what the launcher says is compared with it, and the settings of the ranks
with each other, before anything travels.
"""

import collections
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from keras_dist import _backends, _engine, config, errors
from keras_dist._version import __version__
from keras_dist.runtime import launch_environment

__all__ = ["compare_versions", "join_ranks", "take_device"]

ALIKE = (
    "bucket_nbytes",
    "reduce",
    "overlap",
    "compression",
    "stall_seconds",
    "stall_abort_seconds",
    "on_failure",
    "timeline",
    "timeline_steps",
    "timeline_mbytes",
    "top",
)  # the settings that all ranks must share

_log = logging.getLogger("keras_dist")


def join_ranks(comm: Any | Sequence[int] | None) -> _engine.Communicator:
    """Starts MPI, unless it has been, and joins the ranks. Collective: every rank; blocks.

    Args:
        comm: as for `keras_dist.init`.

    Raises:
        LaunchError: launcher and MPI do not fit.
        ArgumentTypeError: `comm` is neither a communicator nor a list of ranks.
        ArgumentError: `comm` is a list without this rank, or of ranks that are not there.
        MismatchError: settings differ between the ranks.
    """
    alone = config.settings().single_process
    if not alone:
        _check_process()
    mpi = None if alone else _engine.load_mpi()
    if mpi is not None:
        _check_launcher(mpi)
        _engine.start_mpi(mpi)
        _check_all_live(mpi)
    if comm is None and not alone:
        _check_ranks(mpi)
    members = _as_comm(mpi, comm)
    if mpi is not None:
        _check_settings(members or mpi.COMM_WORLD)
    settings = config.settings()
    joined = _engine.Communicator(mpi, members, settings.reduce)
    joined.watch(settings.stall_seconds, settings.stall_abort_seconds)
    if mpi is not None:
        _engine.take_names_away()
    return joined


def compare_versions(comm: _engine.Communicator) -> None:
    """Makes sure that all ranks run the same Python, keras_dist, Keras and backend. Collective.

    Raises:
        MismatchError: the versions differ; raised on every rank.
    """
    host = os.uname().nodename
    everyone = _engine.allgather_object(comm, (host, _versions(_backends.in_use())))
    root, expected = everyone[0]
    for rank, (host, received) in enumerate(everyone):
        if received != expected:
            raise errors.MismatchError(
                errors.explain(
                    f"[rank {rank} of {comm.size}]",
                    f"{expected} as on rank 0 (on {root})",
                    f"{received} (on {host})",
                    "Install the same versions on every host, or use one environment that all "
                    "hosts see.",
                )
            )


def take_device(comm: _engine.Communicator) -> None:
    """Takes this rank's GPU and its share of the cores."""
    backends = _backends.in_use()
    settings = config.settings()
    if settings.pin_device:
        for backend in backends:
            trouble = backend.pin_device(comm.local_rank, comm.local_size)
            if trouble is not None:
                _log.warning("%s %s", comm.where(), trouble)
    for backend in backends:
        _engine.wait_first(backend.finish_calls)
    cores = _cores_of_ranks(comm)
    comm.fewest_cores = min(cores)
    if comm.size > 1 or settings.threads:
        # The size that was put into the environment at import was a guess, and no choice.
        override = settings.threads > 0 or launch_environment.has_sized_threads()
        for backend in backends:
            backend.limit_threads(settings.threads or cores[comm.rank], override)


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


def _check_process() -> None:
    if launch_environment.is_child() and launch_environment.announced_size() is not None:
        raise errors.LaunchError(
            errors.explain(
                "[keras_dist.init]",
                "a process that a launcher has started",
                "a child that multiprocessing has started from one, which is no rank",
                "Put what the script does under if __name__ == '__main__', so that its children "
                "do not run it, and use keras_dist in the script alone.",
            )
        )


def _check_launcher(mpi: Any) -> None:
    """Finds the one wrong pair of launcher and library that MPI itself does not survive."""
    announced = launch_environment.announced_size()
    vendor = mpi.get_vendor()[0]
    if (
        announced is not None
        and announced.variable.startswith("OMPI_")
        and vendor not in ("Open MPI", "Spectrum MPI")
        and not mpi.Is_initialized()
    ):
        raise _not_together(announced, _engine.library(mpi))


def _check_all_live(mpi: Any) -> None:
    """Makes sure that no rank has died before, in a job whose others go on."""
    if _engine.outlives_processes() and (dead := mpi.COMM_WORLD.Get_failed().Get_size()):
        raise errors.LaunchError(
            errors.explain(
                "[keras_dist.init]",
                "all ranks to live",
                f"{dead} of {mpi.COMM_WORLD.size} that have died",
                "After a shutdown the ranks that live cannot join again: leave shutdown out, or "
                "start the job again.",
            )
        )


def _check_ranks(mpi: Any | None) -> None:
    announced = launch_environment.announced_size()
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


def _check_settings(comm: Any) -> None:
    """Makes sure that what decides how data travels is set alike. Collective."""
    everyone = comm.allgather([(name, getattr(config.settings(), name)) for name in ALIKE])
    for rank, theirs in enumerate(everyone):
        for (name, expected), (_, received) in zip(everyone[0], theirs, strict=True):
            if received != expected:
                variable = config.PREFIX + name.upper()
                raise errors.MismatchError(
                    errors.explain(
                        f"[rank {rank} of {len(everyone)}]",
                        f"{variable}={expected} as on rank 0",
                        repr(received),
                        "Set it alike on every rank; mpiexec passes variables on with -x "
                        "(Open MPI) or -genv (MPICH).",
                    )
                )


def _versions(backends: Sequence[Any]) -> str:
    """Returns what this process runs, in words. Of Python, patches need not be the same."""
    frameworks = [backend.__name__.rpartition(".")[2] for backend in backends]
    loaded = [(name, sys.modules.get(name)) for name in ("keras", *frameworks)]
    packages = [f"{name} {module.__version__}" for name, module in loaded if module is not None]
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join([python, f"keras_dist {__version__}", *packages])


def _not_together(announced: launch_environment.Announcement, found: str) -> errors.LaunchError:
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


def _cores_of_ranks(comm: _engine.Communicator) -> list[int]:
    """Returns every rank's share of the cores it may run on, at least 1. Collective.

    A core that several ranks of a node may use counts for each of them by its share, so
    bound and unbound ranks are both right.
    """
    if not hasattr(os, "sched_getaffinity"):
        share = max(1, (os.cpu_count() or 1) // comm.local_size)
        return _engine.allgather_object(comm, share)
    places = _engine.allgather_object(comm, (os.uname().nodename, os.sched_getaffinity(0)))
    users = collections.Counter((node, core) for node, cores in places for core in cores)
    shares = [sum(1 / users[node, core] for core in cores) for node, cores in places]
    return [max(1, int(share + 1e-6)) for share in shares]
