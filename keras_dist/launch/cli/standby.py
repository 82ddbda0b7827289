"""The next start of a job, kept ready while it runs: a second job. See decision 72."""

import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras_dist.launch.channel import Channel, Listener
from keras_dist.launch.cli.job_process import end_with_parent, kill_children

START_SECONDS = 5.0  # after the start of the job, which needs the cores itself
END_SECONDS = 2.0
POLL_SECONDS = 1.0
STARTS = 2
MOST_CLIENTS = 65536  # one for each rank, however many there are


@dataclasses.dataclass
class _Start:
    """A start of the job."""

    command: Sequence[str]
    environment: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    channels: dict[int, Channel] = dataclasses.field(default_factory=dict)
    size: int = 0
    steps: int = 0
    over: threading.Event = dataclasses.field(default_factory=threading.Event)

    def go(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Tells the processes to go; returns whether they run this command in this environment."""
        if self.process is None or self.process.poll() is not None or self.command != command:
            return False
        if not 0 < self.size == len(self.channels):
            return False
        changed = {
            name: text for name, text in environment.items() if self.environment.get(name) != text
        }
        try:
            for channel in self.channels.values():
                channel.send(environment=changed)
        except OSError:
            return False
        return True


class Standby:
    """Starts processes that stand by, and tells them to go."""

    def __init__(self, server: socket.socket, token: str, place: int, count: int):
        self._place, self._words = place, ["--standby", str(count)]
        self._lock = threading.Lock()
        self._next: _Start | None = None
        self._running: _Start | None = None
        self._listener = Listener(server, token, MOST_CLIENTS, self._serve)

    @property
    def has_progressed(self) -> bool:
        """Whether the running job has taken a step, as far as the processes know."""
        return self._next is not None and self._next.steps > 0

    def prepare(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts processes for the next start of the job, a while after the job."""
        self._next = _Start(command, dict(environment))
        target = threading.Thread(target=self._keep, args=(self._next,), name="keras_dist standby")
        target.daemon = True
        target.start()

    def take(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes] | None":
        """Tells the processes to go, and returns them; ends and returns `None` if unusable."""
        with self._lock:
            start, self._next = self._next, None
        _end(self._running)
        self._running = start if start is not None and start.go(command, environment) else None
        if self._running is None:
            _end(start)
            return None
        return self._running.process

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            start, self._next = self._next, None
        _end(self._running)
        _end(start)
        self._listener.close()

    def _keep(self, start: _Start) -> None:
        """Starts the processes, which end with the thread that has started them."""
        # On a loaded host mpiexec may fail to start.
        for _ in range(STARTS):
            if start.over.wait(START_SECONDS):
                return
            with self._lock, contextlib.suppress(OSError):
                if self._next is start:
                    start.process = self._started(start)
            while start.process is None or start.process.poll() is None or start.channels:
                if start.over.wait(POLL_SECONDS):
                    return
        start.over.wait()

    def _started(self, start: _Start) -> "subprocess.Popen[bytes]":
        at = len(start.command) - self._place
        return subprocess.Popen(
            [*start.command[:at], *self._words, *start.command[at:]],
            # Otherwise a step of Slurm waits for the cores of the job.
            env={**start.environment, "SLURM_OVERLAP": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def _serve(self, me: dict[str, Any], channel: Channel) -> None:
        with self._lock:
            start = self._next
            if start is None or str(me["restart"]) != start.environment["KERAS_DIST_RESTART"]:
                return
            start.channels[me["rank"]], start.size = channel, me["size"]
        while (message := channel.receive()) is not None:
            with self._lock:
                if self._next is not None:
                    self._next.steps = message["steps"]


def _end(start: _Start | None) -> None:
    """Ends the processes of a start, unless they have ended, and then its thread."""
    if start is None:
        return
    for channel in start.channels.values():
        channel.close()
    process = start.process
    if process is not None and process.poll() is None:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kill_children()
    start.over.set()


@contextlib.contextmanager
def standing_by(
    environment: dict[str, str], hosts: Iterable[str] | None, place: int, count: int
) -> Iterator[Standby | None]:
    """Keeps a job ready for restarts, and tells its ranks by a variable where to connect."""
    with tempfile.TemporaryDirectory(prefix="keras_dist-") as folder:
        try:
            server, addresses = _listen(folder, hosts)
        except OSError:  # as where the path of the temporary folder is too long
            yield None
            return
        token = secrets.token_urlsafe(32)
        environment["KERAS_DIST_STANDBY_SERVER"] = "@".join([token, *addresses])
        standby = Standby(server, token, place, count)
        try:
            yield standby
        finally:
            standby.close()


def _listen(folder: str, hosts: Iterable[str] | None) -> tuple[socket.socket, list[str]]:
    """Returns a socket for the processes of these hosts, or of this one alone; its addresses."""
    if hosts is None:
        path = os.path.join(folder, "standby")
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(128)
        return server, [path]
    server = socket.create_server(("", 0), backlog=128)
    port = server.getsockname()[1]
    names = dict.fromkeys([*map(_address_towards, hosts), socket.gethostname()])
    return server, [f"{name}:{port}" for name in names if name]


def _address_towards(host: str) -> str:
    """Returns the address of this host that another one sees; empty if it is unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""
