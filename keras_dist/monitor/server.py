"""The server of jobs: a page at `/`, lines of JSON at `/job`, Prometheus' text at `/metrics`.

At a port, a request has the token in the header `Authorization: Bearer TOKEN` or as `?token=TOKEN`.
A Unix socket needs none: only its user can open it. The page is one file without external
resources, and requests the jobs once a second.
"""

import contextlib
import hmac
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from keras_dist.monitor.report import Job

MAX_REQUESTS = 16
REQUEST_SECONDS = 10.0  # for a whole request, which may arrive byte by byte
POLL_SECONDS = 0.5
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_log = logging.getLogger("keras_dist")


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers each request in a thread of its own, up to a limit; further requests are closed."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MAX_REQUESTS  # a client beyond that tries again after a second

    def __init__(
        self,
        get_jobs: Callable[[], Sequence[Job]],
        address: tuple[str, int] | str,
        token: str | None = None,
    ):
        self.get_jobs, self.token = get_jobs, token
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self._ends: dict[socket.socket, float] = {}
        is_ip6 = not isinstance(address, str) and ":" in address[0]
        self.address_family = socket.AF_INET6 if is_ip6 else socket.AF_INET
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # a path
        _listening.add(self)
        serve = threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), name="keras_dist top", daemon=True
        )
        serve.start()

    def close(self) -> None:
        """Stops serving."""
        _listening.discard(self)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
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
            client = client_address[0] if client_address else "this user"
            _log.warning("A request of %s failed.", client, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._has_token(url):
            headers = {"WWW-Authenticate": "Bearer"}
            self._send("text/plain", b"A token is required.\n", headers, status=401)
        elif url.path == "/":
            self._send("text/html; charset=utf-8", PAGE.read_bytes(), PAGE_HEADERS)
        elif url.path == "/job":
            lines = "".join(f"{job.to_json()}\n" for job in self.server.get_jobs())
            self._send("application/x-ndjson", lines.encode())
        elif url.path == "/metrics":
            from keras_dist.monitor import prometheus  # only where it is scraped

            self._send(prometheus.CONTENT_TYPE, prometheus.to_text(self.server.get_jobs()))
        else:
            self.send_error(404)

    def version_string(self) -> str:
        return "HTTP"

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the console belongs to the script."""

    def _has_token(self, url: SplitResult) -> bool:
        if self.server.token is None:
            return True
        kind, _, sent = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            sent = parse_qs(url.query).get("token", [""])[0]
        sent_bytes = sent.strip().encode(errors="replace")
        return hmac.compare_digest(sent_bytes, self.server.token.encode())

    def _send(
        self, kind: str, body: bytes, headers: Mapping[str, str] | None = None, status: int = 200
    ) -> None:
        self.send_response(status)
        always = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in {**always, "Cache-Control": "no-store", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


_listening: set[Server] = set()


def _close_in_child() -> None:
    for server in _listening:
        server.socket.close()
    _listening.clear()


# A forked child that outlives the root would keep the socket open and never answer.
os.register_at_fork(after_in_child=_close_in_child)
