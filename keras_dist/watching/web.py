"""A page for a browser that shows jobs, served on the loopback interface to whoever has its URL.

One file without anything from elsewhere; it asks for the jobs once a second and draws them. The
token in the URL keeps others on this node out. Knows no way in which jobs come here.
"""

import hmac
import secrets
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from keras_dist import errors
from keras_dist.watching.http import Server
from keras_dist.watching.job import Job

__all__ = ["Page"]

PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
POLL_SECONDS = 0.1


class Page:
    """The page, served while it is entered.

    Args:
        get_jobs: gives the jobs, in any thread.
        port: where; 0: any free port.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, get_jobs: Callable[[], Sequence[Job]], port: int):
        token = secrets.token_urlsafe(32)
        fields = {"get_jobs": staticmethod(get_jobs), "token": token}
        try:
            self._server = Server(("127.0.0.1", port), type("_H", (_Handler,), fields))
        except (OSError, OverflowError) as error:
            raise errors.LaunchError(
                errors.explain(
                    "[keras-dist top]",
                    "a free port for the page",
                    f"{port}: {error}",
                    "Choose another one, or leave --port out for any that is free.",
                )
            ) from None
        self.url = f"http://127.0.0.1:{self._server.server_port}/?token={token}"

    def __enter__(self) -> "Page":
        serve = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,))
        serve.daemon = True
        serve.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0
    get_jobs: Callable[[], Sequence[Job]]
    token: str

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        sent = parse_qs(url.query).get("token", [""])[0]
        if not hmac.compare_digest(sent.encode(), self.token.encode()):
            self.send_error(403, "The token is missing: open the URL as it was printed.")
        elif url.path == "/":
            self._send("text/html; charset=utf-8", PAGE.read_bytes())
        elif url.path == "/jobs":
            jobs = ",".join(job.to_json() for job in self.get_jobs())
            self._send("application/json", f"[{jobs}]".encode())
        else:
            self.send_error(404)

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Content-Length": len(body), **HEADERS}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal shows the URL."""
