"""The web page of jobs, served on the loopback interface.

The page is one file without external resources. It requests the jobs once a second. The URL holds
a token, so that other users of the node have no access.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import SplitResult

from keras_dist import errors
from keras_dist.monitor.http import Handler, Server
from keras_dist.monitor.job import Job
from keras_dist.monitor.token import new_token

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


class Page:
    """The web server of the page, a context manager."""

    def __init__(self, get_jobs: Callable[[], Sequence[Job]], port: int):
        token = new_token()
        fields = {"get_jobs": staticmethod(get_jobs), "token": token}
        try:
            self._server = Server(("127.0.0.1", port), type("_H", (_Handler,), fields))
        except (OSError, OverflowError) as error:
            raise errors.LaunchError(
                "[keras-dist top]",
                "a free port for the page",
                f"{port}: {error}",
                "Choose another port, or omit --port for any free one.",
            ) from None
        self.url = f"http://127.0.0.1:{self._server.server_port}/?token={token}"

    def __enter__(self) -> "Page":
        self._server.start("keras_dist page")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()


class _Handler(Handler):
    get_jobs: Callable[[], Sequence[Job]]
    refused = 403, "The token is missing. Open the URL as it was printed."

    def answer(self, url: SplitResult) -> None:
        if url.path == "/":
            self.send("text/html; charset=utf-8", PAGE.read_bytes(), **HEADERS)
        elif url.path == "/jobs":
            jobs = ",".join(job.to_json() for job in self.get_jobs())
            self.send("application/json", f"[{jobs}]".encode(), **HEADERS)
        else:
            self.send_error(404)
