"""A connection between a rank and its server: one JSON object a line, after a proof of the token.

Both sides prove that they know the token, by HMAC-SHA256 over the random challenges of both and the
role of the connection. The token itself is never sent. Until a client has proved it, the server
sends nothing but its challenge.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

HANDSHAKE_SECONDS = 10.0
MAX_NBYTES = 16384  # of a line
RETRY_SECONDS = 0.1
IDLE_SECONDS, PROBE_SECONDS, PROBES = 60, 15, 4  # a silent host is lost after two minutes


class Channel:
    """Sends and receives messages over a connected socket, which it owns."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # Unbuffered: a channel may become the connection of MPI after its handshake.
        self._lines: Any = connection.makefile("rb", buffering=0)

    def accept(self, token: str) -> dict[str, Any] | None:
        """Returns the introduction of a client that has proved the token; else `None`."""
        self._connection.settimeout(HANDSHAKE_SECONDS)
        challenge = secrets.token_hex(32)
        # The timeout of the socket is that of each byte.
        timer = threading.Timer(HANDSHAKE_SECONDS, self.close)
        timer.daemon = True
        timer.start()
        try:
            self.send(challenge=challenge)
            hello = self.receive() or {}
        finally:
            timer.cancel()
        expected = _proof(token, "client", challenge, hello.get("challenge"), hello.get("me"))
        if not hmac.compare_digest(expected, str(hello.get("proof")).encode()):
            return None
        self.send(proof=_proof(token, "server", challenge, hello.get("challenge")).decode())
        self._connection.settimeout(None)
        return hello["me"]

    def introduce(self, token: str, me: dict[str, Any]) -> bool:
        """Proves the token to a server, and returns whether the server has proved it as well."""
        self._connection.settimeout(HANDSHAKE_SECONDS)
        theirs, mine = (self.receive() or {}).get("challenge"), secrets.token_hex(32)
        self.send(challenge=mine, me=me, proof=_proof(token, "client", theirs, mine, me).decode())
        received = str((self.receive() or {}).get("proof")).encode()
        self._connection.settimeout(None)
        return hmac.compare_digest(_proof(token, "server", theirs, mine), received)

    def send(self, **message: Any) -> None:
        """Sends a message. Raises `OSError` if the connection is lost."""
        self.send_line(json.dumps(message))

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the next message; `None` at the end of the connection."""
        if timeout is not None:
            self._connection.settimeout(timeout)
        line = self.receive_line()
        if timeout is not None:
            self._connection.settimeout(None)
        try:
            message = json.loads(line) if line else None
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def send_line(self, line: str) -> None:
        self._connection.sendall(f"{line}\n".encode())

    def receive_line(self) -> str:
        """Returns the next line; an empty string at the end, or if the line is too long."""
        try:
            line = self._lines.readline(MAX_NBYTES)
        except ConnectionError:
            return ""
        return line.decode(errors="replace") if line.endswith(b"\n") else ""

    def detach(self) -> int:
        """Returns the file descriptor of the connection, which the caller owns from now on."""
        self._lines.close()
        self._connection.setblocking(True)
        return self._connection.detach()

    def close(self) -> None:
        """Closes the connection; a thread that receives returns."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Listener:
    """Serves the clients of a socket, which it owns, each in a thread after the proof of the token.

    Further clients than `most` are sent away. A connection is closed when `serve` returns.
    """

    def __init__(
        self,
        server: socket.socket,
        token: str,
        most: int,
        serve: Callable[[dict[str, Any], Channel], None],
    ):
        self._server, self._token, self._act = server, token, serve
        self._free = threading.BoundedSemaphore(most)
        self._closed = False
        threading.Thread(target=self._accept, name="keras_dist listener", daemon=True).start()

    def close(self) -> None:
        """Accepts no further clients."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                time.sleep(RETRY_SECONDS)  # without a free file descriptor, for example
                continue
            if self._free.acquire(blocking=False):
                name, told = "keras_dist client", (connection,)
                threading.Thread(target=self._serve, args=told, name=name, daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            if (me := channel.accept(self._token)) is not None:
                self._act(me, channel)
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            pass  # a stranger, or a connection that is lost
        finally:
            channel.close()
            self._free.release()


def connected(address: str, seconds: float) -> socket.socket:
    """Returns a connection to `host:port`, or to the path of a Unix socket."""
    if not address.startswith("/"):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def _proof(token: str, role: str, *parts: Any) -> bytes:
    text = json.dumps([role, *parts], sort_keys=True).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest().encode()
