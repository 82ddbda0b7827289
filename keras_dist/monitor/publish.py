"""The sockets of the root, from which `keras-dist top` reads the job as lines of JSON.

Only the user may connect to the Unix socket. Everyone on the node can reach the optional loopback
port, so its clients send a token first.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from keras_dist.monitor.job import Job
from keras_dist.monitor.sockets import SUFFIX, TOKEN_SUFFIX, directory, remove_dead
from keras_dist.monitor.token import fits, new_token
from keras_dist.storage.ownership import write_private

PERIOD_SECONDS = 1.0
CLOSE_SECONDS = 1.0  # some systems do not wake a thread in accept
CLIENT_SECONDS = 10.0  # for a client that does not read, or sends no token
MAX_UNAUTHORIZED = 16  # connections without a token yet; further ones are closed


class Publication:
    """Sends the job to every client, one line per second, in threads of its own."""

    def __init__(
        self,
        listener: socket.socket,
        get_job: Callable[[], Job],
        file: Path,
        token: str | None = None,
    ):
        self._listener, self._get_job, self.file, self._token = listener, get_job, file, token
        self._ends = threading.Event()
        self._unauthorized = threading.BoundedSemaphore(MAX_UNAUTHORIZED)
        _listening.append(listener)
        self._accepting = self._start(self._accept)

    def close(self) -> None:
        """Closes the socket, its connections and its file."""
        self._ends.set()
        _listening.remove(self._listener)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        self._accepting.join(CLOSE_SECONDS)
        self.file.unlink(missing_ok=True)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="keras_dist top", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            while not self._ends.is_set():
                connection, _ = self._listener.accept()
                if self._unauthorized.acquire(blocking=False):
                    self._start(self._serve, connection)
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # a client may close at any time
            if not self._authorize(connection):
                connection.sendall(b'{"error": "the token is not that of this job"}\n')
                return
            while not self._ends.is_set():
                connection.sendall(self._get_job().to_json().encode() + b"\n")
                self._ends.wait(PERIOD_SECONDS)

    def _authorize(self, connection: socket.socket) -> bool:
        """Returns whether a client may read."""
        try:
            if self._token is None:
                return True
            sent = _read_line(connection, 2 * len(self._token))
            return fits(sent.strip().decode("latin-1"), self._token)
        finally:
            self._unauthorized.release()
            connection.settimeout(CLIENT_SECONDS)


def _read_line(connection: socket.socket, most: int) -> bytes:
    """Returns a line, which must be complete within the time limit."""
    line, end = b"", time.monotonic() + CLIENT_SECONDS
    while b"\n" not in line and len(line) < most:
        connection.settimeout(max(0.001, end - time.monotonic()))
        if not (more := connection.recv(most - len(line))):
            break
        line += more
    return line


def publish_at_socket(get_job: Callable[[], Job]) -> Publication:
    """Serves a job on a Unix socket to which only this user may connect."""
    remove_dead()
    path = _path(SUFFIX)
    begun = path.with_suffix(".begun")  # a socket without a listener would be removed by others
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        begun.unlink(missing_ok=True)
        listener.bind(str(begun))
        begun.chmod(0o600)
        listener.listen()
        begun.rename(path)
    except OSError:
        listener.close()
        raise
    return Publication(listener, get_job, path)


def publish_at_port(get_job: Callable[[], Job], port: int) -> Publication:
    """Serves a job on a loopback port; the token lies in a private file."""
    token, path = new_token(), _path(TOKEN_SUFFIX)
    listener = socket.create_server(("127.0.0.1", port))
    try:
        path.unlink(missing_ok=True)
        write_private(path, f"{token}\n")
    except OSError:
        listener.close()
        raise
    return Publication(listener, get_job, path, token)


def _path(suffix: str) -> Path:
    return directory() / f"{os.uname().nodename}-{os.getpid()}{suffix}"


_listening: list[socket.socket] = []


def _close_in_child() -> None:
    for listener in _listening:
        listener.close()
    _listening.clear()


# A forked child that outlives the root would keep the socket open and never answer.
os.register_at_fork(after_in_child=_close_in_child)
