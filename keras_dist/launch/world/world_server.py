"""The server of a world: it introduces the ranks to each other, and ends all if one is lost."""

import contextlib
import dataclasses
import enum
import logging
import secrets
import socket
import threading
from typing import Any, Self

from keras_dist import errors
from keras_dist._version import __version__
from keras_dist.launch.channel import Channel, Listener
from keras_dist.launch.world.pmi import ProcessManager, fields

WHERE = "[keras_dist.WorldServer]"
SPARE_CONNECTIONS = 16  # of strangers, beside two for each rank
SHOWN_RANKS = 8
SETTLE_SECONDS = 1.0  # after the first end; what it causes may be heard before it

_log = logging.getLogger("keras_dist")


@dataclasses.dataclass
class _Member:
    """A rank that has joined."""

    channel: Channel
    host: str
    node: str
    left: bool = False


class End(enum.IntEnum):
    """How a rank has ended. Larger ones are more probably consequences."""

    FAILED = 0  # the rank says why
    DIED = 1  # its connection has ended without a word
    ABORTED = 2  # it has called MPI_Abort, perhaps because another rank had died
    WAITED = 3  # it says that it has waited for a rank that had died


class Ends(dict[int, tuple[End, str]]):
    """The ends of the ranks of a job with their reasons, heard in any order."""

    def add(self, rank: int, end: End, reason: str) -> None:
        """Adds an end. The words of a rank replace its abort, and that replaces its death."""
        earlier = self[rank][0] if rank in self else End.DIED
        has_words = end in (End.FAILED, End.WAITED)
        if earlier is End.DIED or (earlier is End.ABORTED and has_words):
            self[rank] = end, reason

    def cause(self) -> tuple[int, End, str]:
        """Returns the most probable cause: the rank, how it has ended, and the reason."""
        # The first one heard that failed or died: a rank may fail because another one has died,
        # without saying so, or die because another one has failed.
        rank = min(self, key=lambda rank: max(self[rank][0], End.DIED))
        return rank, *self[rank]


class WorldServer:
    """Lets processes that other programs have started become the ranks of one job.

    It runs in a process that is not a rank, the driver, and must stay there until the ranks have
    left. Each worker calls `keras_dist.join_world` with the address and the token. The ranks need
    the MPICH library (`pip install 'keras_dist[mpich]'`). If a rank dies, fails or never comes, the
    server ends all ranks.

    Args:
        size: number of ranks.
        host: address of the interface that the workers can reach. Defaults to `"127.0.0.1"`:
            workers on this host only.
        port: port to listen at. Defaults to 0: a free port.
        token: secret that workers must know. Defaults to a random one.
        timeout: seconds within which all ranks must join. Defaults to 300.

    Attributes:
        address: `host:port` for the workers.
        size: number of ranks.
        token: secret for the workers.
        failure: why the world has failed; `None` while it has not.
        failed_rank: the rank whose failure has ended the others; `None` if none did.

    Raises:
        ArgumentError: `size` is less than 1, `token` is empty, or `host` and `port` cannot be
            listened at.

    Example:
    ```python
    with keras_dist.WorldServer(size=2, host="10.0.0.5") as server:
        submit(worker, server.address, server.token)   # calls join_world in each worker
        server.wait()
        ...
    ```
    """

    def __init__(
        self,
        size: int,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        timeout: float = 300.0,
    ):
        if not isinstance(size, int) or size < 1:
            raise errors.ArgumentError(
                WHERE, "size to be 1 rank or more", repr(size), "Pass size=2."
            )
        if token == "":
            raise errors.ArgumentError(
                WHERE, "a token", "an empty one", "Leave it out for a random one."
            )
        self.size = size
        self.token = secrets.token_urlsafe(32) if token is None else token
        self._manager = ProcessManager(size)
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._mpi: set[int] = set()
        self._refusals: list[str] = []
        self._ends = Ends()
        self.failure: str | None = None
        self._started = False
        self._closed = False
        self.failed_rank: int | None = None
        try:
            listening = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise errors.ArgumentError(
                WHERE,
                "host and port that this process can listen at",
                f"{host}:{port} ({error.strerror})",
                "Pass the address of an interface of this host, and a free port or 0.",
            ) from error
        self.address = f"{host}:{listening.getsockname()[1]}"
        most = 2 * size + SPARE_CONNECTIONS
        self._listener = Listener(listening, self.token, most, self._serve)
        expire = threading.Thread(target=self._expire, args=(timeout,), name="keras_dist world")
        expire.daemon = True
        expire.start()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all ranks have left.

        Args:
            timeout: seconds. Defaults to `None`: no limit.

        Raises:
            RankError: a rank died, failed or never came; or `timeout` has passed.
        """
        with self._changed:
            ended = self._changed.wait_for(lambda: self.failure or self._all_left(), timeout)
        if self.failure is not None:
            raise errors.RankError(f"{WHERE} {self.failure}")
        if not ended:
            expected = f"all {self.size} ranks to leave within {timeout} s"
            received = "ranks that still run"
            remedy = "Pass a longer timeout."
            raise errors.RankError(errors.explain(WHERE, expected, received, remedy))

    def close(self) -> None:
        """Stops serving. Ranks that have not left are ended."""
        with self._changed:
            running = bool(self._members) and not self._all_left()
            self._closed = True
            if self._ends:
                self._changed.wait_for(lambda: self.failure, 2 * SETTLE_SECONDS)
        if running:
            self._fail("The server of the world was closed while ranks were running.")
        self._listener.close()
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, me: dict[str, Any], channel: Channel) -> None:
        """Enters a connection of a rank and reads from it, or tells the rank why not."""
        rank, is_mpi = me["rank"], me["purpose"] == "mpi"
        with self._changed:
            closed = "The server of the world was closed." if self._closed else None
            is_known = rank in (self._mpi if is_mpi else self._members)
            refusal = self.failure or closed or self._refusal(me, is_known)
            if refusal is not None:
                self._refusals.append(refusal)
            elif is_mpi:
                self._mpi.add(rank)
            else:
                self._members[rank] = _Member(channel, me["host"], me["node"])
        if refusal is not None:
            channel.send(event="end", reason=refusal)
            return
        if is_mpi:
            channel.send(event="joined")
        self._start_if_complete()
        follow = self._answer if is_mpi else self._follow
        follow(rank, channel)

    def _refusal(self, me: dict[str, Any], is_known: bool) -> str | None:
        rank, where = me["rank"], f"[rank {me['rank']} of {self.size}, on {me['host']}]"
        if me["size"] != self.size:
            expected, received = f"size={self.size} as in WorldServer", f"size={me['size']}"
        elif not isinstance(rank, int) or not 0 <= rank < self.size:
            expected, received = f"a rank from 0 to {self.size - 1}", f"rank={rank}"
        elif is_known:
            expected, received = "each rank once", f"another process with rank={rank}"
        elif me["version"] != __version__:
            expected, received = f"keras_dist {__version__} as in the driver", me["version"]
        else:
            return None
        return errors.explain(where, expected, str(received), "Correct it in that worker.")

    def _start_if_complete(self) -> None:
        with self._changed:
            if self._started or len(self._members) < self.size or len(self._mpi) < self.size:
                return
            self._started = True
            members = dict(self._members)
            self._changed.notify_all()
        nodes: dict[str, list[int]] = {}
        for rank in sorted(members):
            nodes.setdefault(members[rank].node, []).append(rank)
        for rank, member in members.items():
            local = nodes[member.node]
            with contextlib.suppress(OSError):
                member.channel.send(
                    event="start", local_rank=local.index(rank), local_size=len(local)
                )

    def _answer(self, rank: int, channel: Channel) -> None:
        """Answers the commands of MPI on a rank."""
        while line := channel.receive_line():
            command = fields(line)
            if command.get("cmd") == "abort":
                code = command.get("exitcode", "1")
                self._hear(rank, End.ABORTED, f"has aborted the job, exit code {code}.")
                continue  # the rank closes the connection
            if (answer := self._manager.answer(command)) is not None:
                channel.send_line(answer)
                continue
            left = [rank for rank, member in sorted(self._members.items()) if member.left]
            if left and not self._all_left():  # MPI of this rank waits for one that has left
                self._fail(f"{self._place(left[0])} has left while others wait for it.", left[0])
            return

    def _follow(self, rank: int, channel: Channel) -> None:
        """Waits until a rank leaves, fails or is lost."""
        message = channel.receive() or {}
        if message.get("event") == "left":
            with self._changed:
                self._members[rank].left = True
                self._changed.notify_all()
            self._manager.close()
        elif message.get("event") == "failed":
            end = End.WAITED if message.get("is_consequence") else End.FAILED
            self._hear(rank, end, f"has failed: {message.get('reason')}")
        else:
            self._hear(rank, End.DIED, "has ended without leaving the job.")

    def _expire(self, timeout: float) -> None:
        with self._changed:
            joined = self._changed.wait_for(
                lambda: self._closed or self.failure or not self._missing(), timeout
            )
            missing = self._missing()
        if joined:
            return
        names = ", ".join(str(rank) for rank in missing[:SHOWN_RANKS])
        more = f" and {len(missing) - SHOWN_RANKS} more" if len(missing) > SHOWN_RANKS else ""
        refused = f" Refused: {self._refusals[-1]}" if self._refusals else ""
        self._fail(
            errors.explain(
                f"[rank {names}{more} of {self.size}]",
                f"to join within {timeout:g} s",
                "nothing",
                "Check that the worker runs and reaches the server, or pass a longer timeout."
                + refused,
            )
        )

    def _hear(self, rank: int, end: End, reason: str) -> None:
        """Notes how a rank has ended, and ends all others because of the most probable cause."""
        # Threads read the connections, so the abort of a rank that has waited for a dead one may be
        # heard before that death. The thread that hears the first end waits for further ends.
        with self._changed:
            is_first = not self._ends
            self._ends.add(rank, end, reason)
            self._changed.notify_all()
            if not is_first:
                return
            self._changed.wait_for(
                lambda: self.failure or self._ends.cause()[1] is End.FAILED, SETTLE_SECONDS
            )
            cause, _, reason = self._ends.cause()
        self._fail(f"{self._place(cause)} {reason}", cause)

    def _fail(self, reason: str, rank: int | None = None) -> None:
        """Ends all ranks, with a reason that they print. The first reason counts."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self.failed_rank = reason, rank
            members = [member for member in self._members.values() if not member.left]
            self._changed.notify_all()
        _log.error("%s", reason)
        for member in members:
            with contextlib.suppress(OSError):
                member.channel.send(event="end", reason=reason)
        self._manager.close()

    def _missing(self) -> list[int]:
        return [
            rank for rank in range(self.size) if not (rank in self._members and rank in self._mpi)
        ]

    def _all_left(self) -> bool:
        return len(self._members) == self.size and all(
            member.left for member in self._members.values()
        )

    def _place(self, rank: int) -> str:
        member = self._members.get(rank)
        host = "a host that it has not told" if member is None else member.host
        return f"[rank {rank} of {self.size}] This rank, on {host},"
