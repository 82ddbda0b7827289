"""The root's sockets, on which `keras-dist top` reads the job as lines of JSON.

A Unix socket that its user alone may connect to, and, where one is asked for, a loopback port,
which everyone on the node can reach: so whoever connects to it has to send a token first.
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

__all__ = ["Publication", "publish_at_port", "publish_at_socket"]

PERIOD_SECONDS = 1.0
CLOSE_SECONDS = 1.0  # not every system wakes who waits for a connection
CLIENT_SECONDS = 10.0  # after which one that does not read, or sends no token, is left
MAX_STRANGERS = 16  # that have connected and sent no token yet; others are turned away


class Publication:
    """Sends a job to all who connect, a line a second, in threads of its own.

    Args:
        listener: the socket that they connect to.
        get_job: gives the job; called in a thread for each who watches.
        file: what is removed at the end.
        token: what they must send first. Defaults to `None`, nothing.
    """

    def __init__(
        self,
        listener: socket.socket,
        get_job: Callable[[], Job],
        file: Path,
        token: str | None = None,
    ):
        self._listener, self._get_job, self.file, self._token = listener, get_job, file, token
        self._ends = threading.Event()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        _listening.append(listener)
        self._accepting = self._start(self._accept)

    def close(self) -> None:
        """Ends it, and removes its file. Those who are connected see the end of their lines."""
        self._ends.set()
        _listening.remove(self._listener)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._listener.close()
        self._accepting.join(CLOSE_SECONDS)
        self.file.unlink(missing_ok=True)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="keras_dist top", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while not self._ends.is_set():
                connection, _ = self._listener.accept()
                if self._strangers.acquire(blocking=False):
                    self._start(self._serve, connection)
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # who reads may leave at any time
            if not self._comes_to_be_known(connection):
                connection.sendall(b'{"error": "the token is not that of this job"}\n')
                return
            while not self._ends.is_set():
                connection.sendall(self._get_job().to_json().encode() + b"\n")
                self._ends.wait(PERIOD_SECONDS)

    def _comes_to_be_known(self, connection: socket.socket) -> bool:
        """Tells whether one that has connected may read; a stranger no more, in any case."""
        try:
            if self._token is None:
                return True
            sent = _read_line(connection, 2 * len(self._token))
            return fits(sent.strip().decode("latin-1"), self._token)
        finally:
            self._strangers.release()
            connection.settimeout(CLIENT_SECONDS)


def _read_line(connection: socket.socket, most: int) -> bytes:
    """Returns a line; all of it has to come in time, or it might come byte by byte for ever."""
    line, end = b"", time.monotonic() + CLIENT_SECONDS
    while b"\n" not in line and len(line) < most:
        connection.settimeout(max(0.001, end - time.monotonic()))
        if not (more := connection.recv(most - len(line))):
            break
        line += more
    return line


def publish_at_socket(get_job: Callable[[], Job]) -> Publication:
    """Publishes a job on a Unix socket, which this user alone may connect to.

    Raises:
        OSError: it cannot be made.
        LaunchError: its directory is not this user's alone.
    """
    remove_dead()
    path = _path(SUFFIX)
    begun = path.with_suffix(".begun")  # who finds a socket to which nobody listens removes it
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
    """Publishes a job on a loopback port; the token of those who may connect lies in a file.

    Raises:
        OSError: the port is taken, or the file cannot be written.
        LaunchError: the directory of the file is not this user's alone.
    """
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


def _forget() -> None:
    for listener in _listening:
        listener.close()
    _listening.clear()


# A forked child that outlives the root would seem to listen, and never answer.
os.register_at_fork(after_in_child=_forget)
