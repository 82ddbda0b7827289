"""A rank in a process that another program has started: it joins a world, and leaves it."""

import atexit
import contextlib
import functools
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from keras_dist import _engine, errors, runtime
from keras_dist._version import __version__
from keras_dist.launch.channel import Channel, connected
from keras_dist.launch.interactive.outcome import is_consequence
from keras_dist.runtime import launch_environment

CONNECT_SECONDS = 10.0
MAX_REASON = 1000  # characters
GRACE_SECONDS = 2.0  # for the last words of a rank whose job ends


def join_world(address: str, rank: int, size: int, token: str, timeout: float = 300.0) -> "Member":
    """Makes this process a rank of the job that a `WorldServer` describes.

    Call it in a process that no MPI launcher has started, before `keras_dist.init`. It returns when
    all ranks have joined. If another rank dies, fails or never comes, this process prints the
    reason and exits with code 1. At its end, the process leaves the job.

    Collective: every rank of the world; blocks.

    Args:
        address: `host:port` of the server.
        rank: rank of this process, 0 to `size - 1`.
        size: number of ranks, as in the server.
        token: token of the server.
        timeout: seconds to wait for the other ranks. Defaults to 300.

    Returns:
        The membership. Its methods `fail` and `fail_with` end the job, and `leave` leaves it before
        the end of the process.

    Raises:
        ArgumentError: `address` is no address.
        LaunchError: this process is a rank already, the MPI library is not MPICH, the server cannot
            be reached, does not know the token, or refuses this rank.

    Example:
    ```python
    keras_dist.join_world("10.0.0.5:4321", rank=1, size=2, token=token)
    keras_dist.init()
    ...
    ```
    """
    where = f"[rank {rank} of {size}]"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise errors.ArgumentError(
            where, "address as host:port", repr(address), "Pass server.address."
        )
    _check_process(where)
    me = {
        "rank": rank,
        "size": size,
        "version": __version__,
        "host": socket.gethostname(),
        "node": _node(),
    }
    member = _connect(address, token, {**me, "purpose": "member"}, where)
    mpi = _connect(address, token, {**me, "purpose": "mpi"}, where)
    _expect("joined", mpi, timeout, where)
    start = _expect("start", member, timeout, where)
    os.environ.update(
        PMI_FD=str(mpi.detach()),
        PMI_RANK=str(rank),
        PMI_SIZE=str(size),
        MPI_LOCALRANKID=str(start["local_rank"]),
        MPI_LOCALNRANKS=str(start["local_size"]),
    )
    launch_environment.limit_threads()
    return Member(member)


class Member:
    """The membership of this process in a world."""

    def __init__(self, channel: Channel):
        self._channel, self._pid = channel, os.getpid()
        self._ended = threading.Event()
        # Handlers run in reverse order: that of `init`, which waits for the ranks, is before it.
        atexit.register(self.leave)
        threading.Thread(target=self._follow, name="keras_dist world", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Ends the job: the other ranks print the reason and exit."""
        self._end(event="failed", reason=reason[:MAX_REASON])

    def fail_with(self, error: BaseException) -> None:
        """Ends the job as `fail` does, because of an exception."""
        self._end(
            event="failed",
            reason=f"{type(error).__name__}: {error}"[:MAX_REASON],
            is_consequence=is_consequence(error),
        )

    def leave(self) -> None:
        """Leaves the job, as the end of the process does, after `keras_dist.shutdown`."""
        self._end(event="left")

    def _end(self, **message: Any) -> None:
        if self._ended.is_set() or os.getpid() != self._pid:  # a forked child is not a rank
            return
        self._ended.set()
        with contextlib.suppress(OSError):  # the server may have gone
            self._channel.send(**message)
        self._channel.close()

    def _follow(self) -> None:
        message = self._channel.receive() or {"reason": "The server of the world has gone."}
        if self._ended.is_set():
            return
        # The errors of this rank are clearer than the end of another one.
        if not self._ended.wait(GRACE_SECONDS):
            sys.stderr.write(f"{message.get('reason')}\n")
            sys.stderr.flush()
            os._exit(1)


def _check_process(where: str) -> None:
    announced = launch_environment.announced_size()
    if runtime.is_initialized() or (announced is not None and announced.size > 1):
        found = "a rank" if announced is None else f"a rank, according to {announced.variable}"
        raise errors.LaunchError(
            where,
            "a process that is not a rank yet, before keras_dist.init",
            found,
            "Call join_world first, once, in a process without an MPI launcher.",
        )
    mpi = _engine.library.load_mpi()
    if mpi is None or mpi.get_vendor()[0] != "MPICH" or mpi.Is_initialized():
        if mpi is None:
            found = f"no MPI library ({_engine.library.mpi_failure()})"
        else:
            found = _engine.library.version(mpi)
            found += ", already initialized" if mpi.Is_initialized() else ""
        raise errors.LaunchError(
            where,
            "the library MPICH, not initialized yet",
            found,
            "Install it with: pip install 'keras_dist[mpich]', and call join_world before "
            "mpi4py.MPI is used.",
        )


def _connect(address: str, token: str, me: dict[str, Any], where: str) -> Channel:
    try:
        channel = Channel(connected(address, CONNECT_SECONDS))
        knows = channel.introduce(token, me)
    except OSError as error:
        raise errors.LaunchError(
            where,
            f"a WorldServer at {address}",
            str(error.strerror or error),
            "Check that the driver runs, and that its host= is an address that this host reaches.",
        ) from error
    if not knows:
        channel.close()
        raise errors.LaunchError(
            where,
            f"a WorldServer with this token at {address}",
            "no proof of the token",
            "Pass server.token of the same server.",
        )
    return channel


def _expect(event: str, channel: Channel, timeout: float, where: str) -> dict[str, Any]:
    try:
        message = channel.receive(timeout) or {}
    except TimeoutError:
        raise errors.LaunchError(
            where,
            f"all ranks to join within {timeout:g} s",
            "fewer",
            "Look at the log of the driver, or pass a longer timeout.",
        ) from None
    if message.get("event") == event:
        return message
    reason = message.get("reason", "the server has closed the connection")
    raise errors.LaunchError(f"{where} This rank could not join the world: {reason}")


@functools.cache
def _node() -> str:
    """Returns a name that processes share if, and only if, they can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    kernel = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()} {kernel} {shared}"
