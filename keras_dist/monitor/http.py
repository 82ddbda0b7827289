"""An HTTP server that requires a token and limits its threads.

A request has the token in the header `Authorization: Bearer TOKEN` or as `?token=TOKEN`.
Independent of jobs.
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

MAX_REQUESTS = 16
REQUEST_SECONDS = 10.0  # for a whole request, which may arrive byte by byte
POLL_SECONDS = 0.1

_log = logging.getLogger("keras_dist")


class Handler(BaseHTTPRequestHandler):
    """Answers requests with the token by `answer`, and rejects others."""

    timeout = REQUEST_SECONDS
    token: str
    refused = 401, "A token is required."

    def answer(self, url: SplitResult) -> None:
        """Answers a request."""
        raise NotImplementedError

    def send(self, kind: str, body: bytes, **headers: str) -> None:
        """Sends a response; `_` in the names of headers stands for `-`."""
        self._send(200, {"Content-Type": kind, **headers}, body)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self._has_token(url):
            self.answer(url)
        else:
            status, words = self.refused
            headers = {"Content-Type": "text/plain", "WWW-Authenticate": "Bearer"}
            self._send(status, headers, f"{words}\n".encode())

    def version_string(self) -> str:
        """Returns the name of the server, without a version."""
        return "HTTP"

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the console belongs to the script."""

    def _has_token(self, url: SplitResult) -> bool:
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
    """Answers each request in a thread of its own, up to a limit; further requests are closed."""

    request_queue_size = MAX_REQUESTS  # a client beyond that tries again after a second

    def __init__(self, address: tuple[str, int], handler: type[Handler]):
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self._ends: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def start(self, name: str) -> None:
        """Starts serving in a thread of that name."""
        serve = threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), name=name)
        serve.daemon = True
        serve.start()

    def close(self) -> None:
        """Stops serving."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a request, below the limit."""
        if self._free.acquire(blocking=False):
            self._ends[request] = time.monotonic() + REQUEST_SECONDS
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a request in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """Closes requests that take too long; called periodically."""
        now = time.monotonic()
        for request, end in list(self._ends.items()):
            if now > end:
                self._ends.pop(request, None)
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an exception of a request, unless the connection was closed."""
        if not isinstance(sys.exception(), OSError):
            _log.warning("A request of %s failed.", client_address[0], exc_info=True)
