"""Startup: connects the ranks, checks launcher, settings and versions, assigns device and cores."""

import atexit
import collections
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _backends, _engine, _gpu, config, errors
from keras_dist._version import __version__
from keras_dist.runtime import launch_environment

MPICH_NBYTES = 2**20  # of shared memory for each rank of a node, without which MPI_Init crashes
CLOCK_SECONDS = 60  # by which clocks may differ without a warning
ALIKE = (
    "bucket_nbytes",
    "gpu",
    "reduce",
    "reduction",
    "overlap",
    "compression",
    "stall_seconds",
    "stall_abort_seconds",
    "on_failure",
    "timeline",
    "timeline_steps",
    "timeline_mbytes",
    "top",
)  # the settings that must be equal on all ranks

_log = logging.getLogger("keras_dist")


def connect_ranks(comm: Any | Sequence[int] | None) -> _engine.Communicator:
    """Initializes MPI if needed and connects the ranks. Collective: every rank; blocks."""
    alone = config.settings().single_process
    if not alone:
        _check_process()
    mpi = None if alone else _engine.library.load_mpi()
    if mpi is not None:
        _check_launcher(mpi)
        _check_start(mpi)
        _engine.library.start_mpi(mpi)
        _check_all_live(mpi)
    if comm is None and not alone:
        _check_ranks(mpi)
    members = _as_comm(mpi, comm)
    if mpi is not None:
        # Versions first: another version of keras_dist may have other settings.
        compare_hosts(mpi, members or mpi.COMM_WORLD)
        _check_settings(members or mpi.COMM_WORLD)
    settings = config.settings()
    joined = _engine.Communicator(mpi, members, settings.reduce, reduction=settings.reduction)
    joined.watch(settings.stall_seconds, settings.stall_abort_seconds)
    if mpi is not None:
        _engine.library.unlink_mpich_memory()
    return joined


def take_device(comm: _engine.Communicator) -> None:
    """Pins this rank's GPU and sizes thread pools to its share of the cores."""
    backends = _backends.in_use()
    settings = config.settings()
    local_rank, local_size = comm.topology.local_rank, comm.topology.local_size
    if settings.pin_device:
        for backend in backends:
            warning = backend.pin_device(local_rank, local_size)
            if warning is not None:
                _log.warning("%s %s", comm.where(), warning)
    _split_gpus(comm, backends)
    for backend in backends:
        _engine.set_completion(backend.finish_calls)
    cores = _cores_of_ranks(comm)
    comm.fewest_cores = min(cores)
    if local_size > 1 or comm.size > 1 or settings.threads:
        # `launch_environment.limit_threads` has guessed at import; the user has not chosen.
        override = settings.threads > 0 or launch_environment.has_sized_threads()
        count = settings.threads or cores[comm.rank]
        launch_environment.limit_threads(count)
        for backend in backends:
            backend.limit_threads(count, override)


def _split_gpus(comm: _engine.Communicator, backends: Sequence[Any]) -> None:
    """Tells all ranks the GPU of each, by which they choose the path of its arrays. Collective."""
    numbers = [number for backend in backends if (number := backend.gpu_number()) is not None]
    mine = _gpu.facts_of(numbers[0] if numbers else None)
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    gpus, every = zip(*_engine.collectives.allgather_object(comm, (mine, shares)), strict=True)
    _engine.set_gpus(comm, gpus, config.settings().gpu, all(every))


def _as_comm(mpi: Any | None, comm: Any) -> Any | None:
    if comm is None:
        return None
    if mpi is not None and isinstance(comm, mpi.Comm):
        return comm
    if mpi is not None and isinstance(comm, Sequence) and all(isinstance(r, int) for r in comm):
        return _subset(mpi, list(comm))
    raise errors.ArgumentTypeError(
        "[keras_dist.init]",
        "comm to be an mpi4py.MPI.Comm or a list of ranks"
        + ("" if mpi is not None else ", with an MPI library installed"),
        repr(comm),
        "Leave it out to use all ranks.",
    )


def _subset(mpi: Any, ranks: list[int]) -> Any:
    world = mpi.COMM_WORLD
    if world.rank not in ranks or not set(ranks) <= set(range(world.size)):
        raise errors.ArgumentError(
            f"[rank {world.rank} of {world.size}]",
            f"comm to list ranks between 0 and {world.size - 1}, this rank included",
            repr(ranks),
            "Only ranks in the list may call init with it.",
        )
    group = world.group.Incl(sorted(set(ranks)))
    return world.Create_group(group)


def _check_process() -> None:
    if launch_environment.is_child() and launch_environment.announced_size() is not None:
        raise errors.LaunchError(
            "[keras_dist.init]",
            "a process started by a launcher",
            "a child of it started by multiprocessing, which is not a rank",
            "Put the body of the script under if __name__ == '__main__', so that its children "
            "do not run it, and use keras_dist in the script only.",
        )


def _check_launcher(mpi: Any) -> None:
    """Refuses Open MPI's launcher with another MPI library, which would crash MPI itself."""
    announced = launch_environment.announced_size()
    vendor = mpi.get_vendor()[0]
    if (
        announced is not None
        and announced.variable.startswith("OMPI_")
        and vendor not in ("Open MPI", "Spectrum MPI")
        and not mpi.Is_initialized()
    ):
        raise _launcher_mismatch(announced, _engine.library.version(mpi))


def _check_start(mpi: Any) -> None:
    """Refuses what MPI itself would answer by ending the process: it is over, or lacks memory."""
    if mpi.Is_finalized():
        raise errors.LaunchError(
            "[keras_dist.init]",
            "MPI that is not finalized",
            "a process that has called MPI.Finalize, after which MPI cannot start again",
            "Call keras_dist.init before, and leave MPI.Finalize to the end of the process.",
        )
    count = launch_environment.announced_local_size()
    is_mpich = sys.platform == "linux" and mpi.get_vendor()[0] == "MPICH"
    if not is_mpich or mpi.Is_initialized() or count == 1:
        return
    if (room := _engine.library.shared_memory_nbytes()) < count * MPICH_NBYTES:
        atexit.register(_abort_job)
        raise errors.LaunchError(
            "[keras_dist.init]",
            f"{count * MPICH_NBYTES >> 20} MiB of shared memory, which MPICH needs for {count} "
            "ranks of a node",
            f"{room >> 20} MiB of room in /dev/shm, on {os.uname().nodename}",
            _engine.library.NO_ROOM,
        )


def _check_all_live(mpi: Any) -> None:
    """Checks that no rank has died earlier in a job that continues without it."""
    if _engine.library.survives_process_death() and (
        dead := mpi.COMM_WORLD.Get_failed().Get_size()
    ):
        raise errors.LaunchError(
            "[keras_dist.init]",
            "all ranks to be alive",
            f"{dead} of {mpi.COMM_WORLD.size} ranks dead",
            "The surviving ranks cannot join again after a shutdown: do not call shutdown, or "
            "restart the job.",
        )


def _check_ranks(mpi: Any | None) -> None:
    announced = launch_environment.announced_size()
    seen = 1 if mpi is None else mpi.COMM_WORLD.size
    if announced is not None and announced.size > seen == 1:
        found = (
            f"no MPI library ({_engine.library.mpi_failure()})"
            if mpi is None
            else f"1 process, according to {_engine.library.version(mpi)}"
        )
        raise _launcher_mismatch(announced, found)
    if mpi is not None and seen > 1 and mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise errors.LaunchError(
            "[keras_dist.init]",
            "MPI to allow calls from several threads (MPI_THREAD_SERIALIZED or more)",
            f"thread level {mpi.Query_thread()}",
            "Do not lower mpi4py.rc.thread_level, and let mpi4py initialise MPI.",
        )


def _check_settings(comm: Any) -> None:
    """Checks that the settings of `ALIKE` are equal on all ranks. Collective."""
    settings = comm.allgather([(name, getattr(config.settings(), name)) for name in ALIKE])
    for rank, received_settings in enumerate(settings):
        pairs = zip(settings[0], received_settings, strict=True)
        for (name, expected), (_, received) in pairs:
            if received != expected:
                variable = config.PREFIX + name.upper()
                raise errors.MismatchError(
                    f"[rank {rank} of {len(settings)}]",
                    f"{variable}={expected} as on rank 0",
                    repr(received),
                    "Set the same value on every rank; mpiexec passes variables with -x "
                    "(Open MPI) or -genv (MPICH).",
                )


def _launcher_mismatch(
    announced: launch_environment.Announcement, found: str
) -> errors.LaunchError:
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    hint = f" (it may be {mpiexec})" if os.path.exists(mpiexec) else ""
    atexit.register(_abort_job)
    return errors.LaunchError(
        "[keras_dist.init]",
        f"{announced.size} ranks or more, as announced by {announced.launcher} "
        f"({announced.variable})",
        f"{found}, on {os.uname().nodename}",
        "The launcher and the MPI library of mpi4py do not match. Start the job with the "
        f"mpiexec of that library{hint}, or install the launcher's library. To run a single "
        "process on purpose set KERAS_DIST_SINGLE_PROCESS=1.",
    )


def _abort_job() -> None:
    """Ends the job of Hydra, by PMI-1: ranks with its library wait for this one in MPI_Init."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=1\n")


def _cores_of_ranks(comm: _engine.Communicator) -> list[int]:
    """Returns the number of cores of every rank, at least 1. Collective."""
    everything = range(os.cpu_count() or 1)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything
    affinities = _engine.collectives.allgather_object(comm, (os.uname().nodename, own))
    users = collections.Counter((node, core) for node, cores in affinities for core in cores)
    # A core that n ranks of a node may use counts 1/n for each of them, bound or unbound.
    shares = [sum(1 / users[node, core] for core in cores) for node, cores in affinities]
    return [max(1, int(share + 1e-6)) for share in shares]


def compare_hosts(mpi: Any, comm: Any) -> None:
    """Compares versions and clocks of the ranks. Collective: every rank; blocks."""
    # Uses MPI alone: the messages of another version of keras_dist may have another form.
    found = versions(mpi)
    comm.Barrier()  # so that all ranks read their clocks at the same time
    ranks = comm.allgather((os.uname().nodename, found, time.time()))
    first_host, expected, _ = ranks[0]
    for rank, (host, received, _) in enumerate(ranks):
        known = dict.fromkeys([*expected, *received])
        names = [name for name in known if expected.get(name) != received.get(name)]
        if names:
            raise errors.MismatchError(
                f"[rank {rank} of {len(ranks)}]",
                f"{_listed(expected, names)} as on rank 0 (on {first_host})",
                f"{_listed(received, names)} (on {host})",
                "Install the same versions on every host, or share one environment between the "
                "hosts.",
            )
    if comm.rank == 0:
        _warn_of_clocks([(host, clock) for host, _, clock in ranks])


def _listed(versions: dict[str, str], names: list[str]) -> str:
    return ", ".join(f"{name} {versions.get(name, 'not imported')}" for name in names)


def _warn_of_clocks(clocks: list[tuple[str, float]]) -> None:
    """Warns once of the host whose clock differs most from that of rank 0."""
    first_host, first = clocks[0]
    host, clock = max(clocks, key=lambda pair: abs(pair[1] - first))
    if abs(clock - first) > CLOCK_SECONDS:
        text = errors.explain(
            "[keras_dist.init]",
            f"clocks of all hosts within {CLOCK_SECONDS} s of that of {first_host}",
            f"{clock - first:+.0f} s on {host}",
            "Times in logs and files of the hosts do not compare. Synchronise the clocks, for "
            "example with chronyd; `chronyc tracking` shows the offset.",
        )
        _log.warning("%s", text)


def versions(mpi: Any) -> dict[str, str]:
    """Returns the versions that must match, by name. Patch releases of Python may differ."""
    backends: list[Any] = _backends.in_use()
    frameworks = [backend.name for backend in backends]
    loaded = [(name, sys.modules.get(name)) for name in ("keras", *frameworks)]
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "keras_dist": __version__,
        "MPI": _engine.library.version(mpi),
        "numpy": np.__version__,
        **{name: module.__version__ for name, module in loaded if module is not None},
    }
