"""A page for a browser that shows jobs, served on the loopback interface to whoever has its URL.

One file without anything from elsewhere; it asks for the jobs once a second and draws them. The
token in the URL keeps others on this node out. Knows no way in which jobs come here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import SplitResult

from keras_dist import errors
from keras_dist.monitor.http import Handler, Server
from keras_dist.monitor.job import Job
from keras_dist.monitor.token import new_token

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


class Page:
    """The page, served while it is entered.

    Args:
        get_jobs: gives the jobs, in any thread.
        port: where; 0: any free port.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, get_jobs: Callable[[], Sequence[Job]], port: int):
        token = new_token()
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
        self._server.begin("keras_dist page")
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
    refused = 403, "The token is missing: open the URL as it was printed."

    def answer(self, url: SplitResult) -> None:
        if url.path == "/":
            self.send("text/html; charset=utf-8", PAGE.read_bytes(), **HEADERS)
        elif url.path == "/jobs":
            jobs = ",".join(job.to_json() for job in self.get_jobs())
            self.send("application/json", f"[{jobs}]".encode(), **HEADERS)
        else:
            self.send_error(404)
