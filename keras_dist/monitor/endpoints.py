"""The endpoints of a job: the collector of reports, and what the root serves.

An endpoint that cannot be opened, such as a port in use, is a warning; training continues.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_dist import _engine, config, errors
from keras_dist.monitor.collector import Collector
from keras_dist.monitor.publish import publish_at_port, publish_at_socket
from keras_dist.monitor.sockets import directory
from keras_dist.monitor.token import token_in

PROMETHEUS_TOKEN = "prometheus-token"  # the default file, beside the sockets

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
        self._servers: list[Any] = []
        if comm.rank == 0:
            self._open(config.settings())
        _current = self

    def close(self) -> None:
        """Closes the endpoints. Collective: every rank; blocks."""
        self._close_servers()
        self.collector.close()

    def abandon(self) -> None:
        """Closes the endpoints without waiting for other ranks, because a rank has died."""
        self._close_servers()
        self.collector.abandon()

    def stop_communication(self) -> None:
        """Closes the endpoints, because the state of other ranks is unknown."""
        self.abandon()

    def _open(self, settings: config.Settings) -> None:
        get_job = self.collector.job
        self._try(
            lambda: publish_at_socket(get_job),
            "keras-dist top cannot show this job",
            "Set KERAS_DIST_TOP=0 to turn it off.",
        )
        if port := settings.top_port:
            remedy = "Choose another port, or unset it: keras-dist top shows the jobs of its node."
            self._try(
                lambda: publish_at_port(get_job, port),
                f"KERAS_DIST_TOP_PORT={port} cannot be used",
                remedy,
            )
        if settings.prometheus_port is not None:
            host, number = settings.prometheus_port
            self._try(
                lambda: _serve_prometheus(get_job, host, number, settings.prometheus_token_file),
                f"KERAS_DIST_PROMETHEUS_PORT={host}:{number} cannot be used",
                "Choose another port.",
            )

    def _try(self, make: Callable[[], Any], trouble: str, remedy: str) -> None:
        try:
            self._servers.append(make())
        except (OSError, errors.LaunchError) as error:
            _log.warning("%s: %s. Training continues. %s", trouble, error, remedy)

    def _close_servers(self) -> None:
        global _current
        _current = None
        for server in self._servers:
            server.close()
        self._servers = []


def _serve_prometheus(get_job: Callable[[], Any], host: str, port: int, file: str) -> Any:
    """Opens the port for Prometheus and prints its URL."""
    from keras_dist.monitor.prometheus import Endpoint

    path = Path(file).expanduser() if file else directory() / PROMETHEUS_TOKEN
    endpoint = Endpoint(get_job, host, port, token_in(path))
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    print(f"keras_dist: Prometheus can scrape {url} with the token in {path}.", flush=True)
    return endpoint
