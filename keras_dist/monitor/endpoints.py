"""The endpoints of a job: the collector of reports, and where the root serves them."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_dist import _engine, config, errors
from keras_dist.monitor.collector import Collector
from keras_dist.monitor.report import Job
from keras_dist.monitor.server import Server
from keras_dist.monitor.sockets import SUFFIX, directory, remove_dead, token_in

TOKEN = "prometheus-token"  # the default file of the token, beside the sockets

_log = logging.getLogger("keras_dist")
_current: "Endpoints | None" = None


def current() -> "Endpoints | None":
    """Returns the endpoints of the job of this process; `None` where monitoring is off."""
    return _current


class Endpoints:
    """The endpoints of a job, on this rank. Collective: every rank; blocks."""

    def __init__(self, comm: _engine.Communicator):
        global _current
        self.collector = Collector(comm)
        self._open = contextlib.ExitStack()
        if comm.rank == 0:
            self._serve(config.settings())
        _current = self

    def close(self) -> None:
        """Closes the endpoints. Collective: every rank; blocks."""
        self._close_servers()
        self.collector.close()

    def abandon(self) -> None:
        """Closes the endpoints without waiting for other ranks, because a rank has died."""
        self._close_servers()
        self.collector.abandon()

    stop_communication = abandon  # because the state of other ranks is unknown

    def _serve(self, settings: config.Settings) -> None:
        def get_jobs() -> list[Job]:
            return [self.collector.job()]

        with _warning(
            "keras-dist top cannot show this job", "Set KERAS_DIST_TOP=0 to turn it off."
        ):
            self._open.enter_context(serving_at_socket(get_jobs))
        if port := settings.top_port:
            remedy = "Choose another port, or unset it: keras-dist top shows the jobs of its node."
            with _warning(f"KERAS_DIST_TOP_PORT={port} cannot be used", remedy):
                self._serve_at(("127.0.0.1", port), get_jobs, _token_file(settings))
        if settings.prometheus_port is not None:
            host, port = settings.prometheus_port
            trouble = f"KERAS_DIST_PROMETHEUS_PORT={host}:{port} cannot be used"
            with _warning(trouble, "Choose another port."):
                path = _token_file(settings)
                self._serve_at((host, port), get_jobs, path)
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
                print(
                    f"keras_dist: Prometheus can scrape {url} with the token in {path}.", flush=True
                )

    def _serve_at(
        self, address: tuple[str, int], get_jobs: Callable[[], list[Job]], token_file: Path
    ) -> None:
        self._open.callback(Server(get_jobs, address, token_in(token_file)).close)

    def _close_servers(self) -> None:
        global _current
        _current = None
        self._open.close()


@contextlib.contextmanager
def serving_at_socket(get_jobs: Callable[[], list[Job]]) -> Iterator[Path]:
    """Serves jobs at a Unix socket to which only this user may connect."""
    remove_dead()
    path = directory() / f"{os.uname().nodename}-{os.getpid()}{SUFFIX}"
    begun = path.with_suffix(".begun")  # a socket without a listener would be removed by others
    begun.unlink(missing_ok=True)
    server = Server(get_jobs, str(begun))
    try:
        begun.chmod(0o600)
        begun.rename(path)
        yield path
    finally:
        server.close()
        path.unlink(missing_ok=True)


def _token_file(settings: config.Settings) -> Path:
    file = settings.prometheus_token_file
    return Path(file).expanduser() if file else directory() / TOKEN


@contextlib.contextmanager
def _warning(trouble: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, errors.LaunchError) as error:
        _log.warning("%s: %s. Training continues. %s", trouble, error, remedy)
