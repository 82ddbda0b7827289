"""An HTTP server that requires a token and limits its threads.

A request has the token in the header `Authorization: Bearer TOKEN` or as `?token=TOKEN`.
Knows no jobs.
"""

import contextlib
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from keras_dist.monitor.token import fits

__all__ = ["Handler", "Server"]

MAX_REQUESTS = 16
REQUEST_SECONDS = 10.0  # for all of a request: or it might come byte by byte for ever
POLL_SECONDS = 0.1

_log = logging.getLogger("keras_dist")


class Handler(BaseHTTPRequestHandler):
    """Answers those who bring the token, by `answer`; tells others that they need one."""

    timeout = REQUEST_SECONDS
    token: str
    refused = 401, "A token is needed."

    def answer(self, url: SplitResult) -> None:
        """Answers a request."""
        raise NotImplementedError

    def send(self, kind: str, body: bytes, **headers: str) -> None:
        """Sends an answer of a content type; names of headers have `_` for `-`."""
        self._send(200, {"Content-Type": kind, **headers}, body)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self._brings_token(url):
            self.answer(url)
        else:
            status, words = self.refused
            headers = {"Content-Type": "text/plain", "WWW-Authenticate": "Bearer"}
            self._send(status, headers, f"{words}\n".encode())

    def version_string(self) -> str:
        """Returns what is said of the server: nothing."""
        return "HTTP"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the console is the script's."""

    def _brings_token(self, url: SplitResult) -> bool:
        kind, _, sent = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            sent = parse_qs(url.query).get("token", [""])[0]
        return fits(sent.strip(), self.token)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Answers each request in a thread of its own, and some at a time: others are turned away.

    Args:
        address: host and port to listen at.
        handler: the class that answers a request.

    Raises:
        OSError: the port is taken.
        OverflowError: there is no such port.
    """

    request_queue_size = MAX_REQUESTS  # who finds no place there tries again in a second

    def __init__(self, address: tuple[str, int], handler: type[Handler]):
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        self._ends: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def begin(self, name: str) -> None:
        """Begins to answer, in a thread of that name."""
        serve = threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), name=name)
        serve.daemon = True
        serve.start()

    def close(self) -> None:
        """Ends it."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a request, where there is room."""
        if self._places.acquire(blocking=False):
            self._ends[request] = time.monotonic() + REQUEST_SECONDS
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """Breaks off requests that take too long; called again and again."""
        now = time.monotonic()
        for request, end in list(self._ends.items()):
            if now > end:
                self._ends.pop(request, None)
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs what a request raised; nothing where its connection has ended."""
        if not isinstance(sys.exception(), OSError):
            _log.warning("A request of %s failed.", client_address[0], exc_info=True)
