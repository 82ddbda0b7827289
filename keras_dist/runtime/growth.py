"""Ranks that join a running job: how processes connect, on both sides.

A process that joins runs the script alone, as the last rank of the job at its start would, until
it trains. There it asks to join, through the job's directory. The root sees the request between
two steps, all ranks accept the connection, and the communicator of each continues with more ranks.
"""

import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dist import _engine, config, errors
from keras_dist.runtime import events, exit_hooks, job, replacement, script_ranks, startup
from keras_dist.runtime.job_directory import JobDirectory, is_running

LIMIT_SECONDS = 60.0  # for the ranks to connect once all have agreed to

_log = logging.getLogger("keras_dist")


def takes_joiners() -> bool:
    """Returns whether ranks may join this job: one of a single rank has nothing to share."""
    return bool(config.settings().join_directory) and script_ranks.size() > 1


def announce() -> None:
    """Announces the job in its directory until it ends. Collective: every rank; blocks."""
    comm = job.communicator()
    _engine.check_admits(comm)
    if config.settings().timeline:
        raise errors.ArgumentError(
            comm.where(),
            "no timeline where ranks may join",
            f"KERAS_DIST_TIMELINE={config.settings().timeline}",
            "Unset KERAS_DIST_TIMELINE or KERAS_DIST_JOIN_DIRECTORY.",
        )
    hosts = _engine.collectives.allgather_object(comm, os.uname().nodename, operation="the hosts")
    if comm.rank == 0:
        _directory().announce({"size": size_at_start(), "hosts": hosts, **_this_process()})
    size_at_start()
    _withdraw_at_end()


@functools.cache
def size_at_start() -> int:
    """Returns the number of ranks of the job when it began to take others."""
    about = _directory().job() if config.settings().joins else None
    return job.size() if about is None else int(about["size"])


@functools.cache
def _withdraw_at_end() -> None:
    def withdraw(comm: _engine.Communicator) -> None:
        if comm.rank == 0:
            _directory().withdraw()
        if replacement.is_pending():
            with _limited():
                replacement.forget()
        if comm.rank == 0 and not takes_joiners():
            shutil.rmtree(_temporary(), ignore_errors=True)

    events.subscribe(events.JOB_ENDING, withdraw)


def facts() -> dict[str, str]:
    """Returns what a process that joins must have equal to this rank: versions and settings."""
    return startup.facts_of_joiner(job.communicator().mpi)


def difference(expected: dict[str, str], received: dict[str, str]) -> str | None:
    """Returns the first difference between the `facts` of two processes, in words, or `None`."""
    for name in dict.fromkeys([*expected, *received]):
        if expected.get(name) != received.get(name):
            return f"{name} {received.get(name)}, where the job has {expected.get(name)}"
    return None


def requests() -> dict[str, dict[str, Any]]:
    """Returns the processes that ask to join and are still alive, by id. On the root."""
    return {name: asks for name, asks in _directory().requests().items() if is_running(asks)}


def is_asked() -> bool:
    """Returns whether processes ask to join; looks once a second at most. On the root."""
    return _directory().is_asked()


def refuse(name: str, reason: str) -> None:
    """Tells a process why it cannot join. On the root."""
    _directory().answer(name, {"reason": reason})


def replace() -> str | None:
    """Spawns a process that joins in the place of a rank that has died. Collective; blocks.

    Returns:
        Why none was spawned; `None` if one was.
    """
    comm = job.communicator()
    with _limited():
        return replacement.spawn(str(_directory().path) if comm.rank == 0 else "")


def is_waiting() -> bool:
    """Returns whether this process is to join a job and has not yet."""
    return job.joins_as() is not None


def accept(names: Sequence[str], spawned: bool, shared: Any) -> None:
    """Lets processes join. Collective: every rank of the job so far; blocks."""
    comm = job.communicator()
    world, before = comm.world, comm.size
    with _limited():
        port = comm.mpi.Open_port() if comm.rank == 0 and not spawned else ""
        for later, name in zip(reversed(range(len(names))), names, strict=True):
            if comm.rank == 0:
                _directory().answer(name, {"port": port})
            world = replacement.merge() if spawned else _accept_one(world, port)
            # For the rank that has just joined; earlier ones know it.
            world.bcast((later, shared))
        if port:
            comm.mpi.Close_port(port)
        _admit(comm, world, spawned)
    if comm.rank == 0:
        several = "ranks have" if len(names) > 1 else "rank has"
        where = _engine.progress.describe_progress()
        place = f" ({where})" if where else ""
        _log.warning(
            f"keras_dist: {len(names)} {several} joined{place}. "
            f"{comm.size} ranks continue instead of {before}."
        )


def connect(about: dict[str, Any]) -> Any:
    """Joins the job. Collective with `accept` on the ranks of the job; blocks."""
    comm, directory = job.communicator(), _directory()
    spawned = replacement.is_spawned()
    asks = {**_this_process(), "alike": facts(), "spawned": spawned, **about}
    try:
        limit = config.settings().stall_abort_seconds
        answer = directory.wait_for_answer(directory.request(asks), limit)
    except TimeoutError as error:
        raise _cannot_join(str(error)) from error
    if answer is None and spawned:
        replacement.leave()  # the job has ended without it, which is no error
    if answer is None or "port" not in answer:
        reason = "no job: it has ended" if answer is None else answer["reason"]
        raise _cannot_join(reason)
    with _limited():
        if spawned:
            world = replacement.merge()
        else:
            world = comm.mpi.COMM_SELF.Connect(answer["port"]).Merge(high=True)
        later, shared = world.bcast(None)
        for _ in range(later):
            world = _accept_one(world, "")
            world.bcast(None)
        job.join_as(None)
        _admit(comm, world, spawned, _start_services)
    return shared


def _accept_one(world: Any, port: str) -> Any:
    return world.Accept(port, root=0).Merge(high=False)


def _admit(
    comm: _engine.Communicator, world: Any, spawned: bool, start_services: Any = None
) -> None:
    _engine.admit(comm, world, spawned, start_services)
    startup.split_devices(comm)
    job.renumber()


def _start_services() -> None:
    settings = config.settings()
    comm = job.communicator()
    comm.watch(settings.stall_seconds, settings.stall_abort_seconds)
    events.publish(events.JOB_STARTED, comm)
    exit_hooks.install()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends this process if the ranks do not connect in time: MPI itself would wait forever."""

    def end() -> None:
        sys.stderr.write(
            f"keras_dist: the ranks have not connected within {LIMIT_SECONDS:.0f} s, while a rank "
            "was joining. The job ends now.\n"
        )
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(LIMIT_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cannot_join(reason: str) -> errors.LaunchError:
    return errors.LaunchError(
        "[keras-dist join]",
        f"a running job in {config.settings().join_directory} that accepts this process",
        reason,
        "Start the same script with the same arguments while the job trains.",
    )


@functools.cache
def _directory() -> JobDirectory:
    return JobDirectory(config.settings().join_directory or _temporary())


@functools.cache
def _temporary() -> str:
    """Returns a directory for the processes that replace ranks, where no others may join."""
    return tempfile.mkdtemp(prefix="keras_dist-job-")


def _this_process() -> dict[str, Any]:
    return {"host": os.uname().nodename, "pid": os.getpid()}
