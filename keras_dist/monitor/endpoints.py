"""What attends a job so that it can be watched: the gathering of reports, and the root's ways out.

A way that cannot be opened, such as a port that is taken, is named in a warning; training goes on.
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

__all__ = ["Endpoints", "current"]

PROMETHEUS_TOKEN = "prometheus-token"  # the usual file, beside the sockets

_log = logging.getLogger("keras_dist")
_current: "Endpoints | None" = None


def current() -> "Endpoints | None":
    """Returns what attends the job of this process, if it can be watched."""
    return _current


class Endpoints:
    """The watching of a job, on this rank. Collective: every rank makes one; blocks.

    Args:
        comm: the ranks of the job.
    """

    def __init__(self, comm: _engine.Communicator):
        global _current
        self.gathering = Collector(comm)
        self._outlets: list[Any] = []
        if comm.rank == 0:
            self._open(config.settings())
        _current = self

    def close(self) -> None:
        """Ends it. Collective: every rank; blocks."""
        self._close_outlets()
        self.gathering.close()

    def abandon(self) -> None:
        """Ends it where a rank has died, so that no others can be waited for."""
        self._close_outlets()
        self.gathering.abandon()

    def be_alone(self) -> None:
        """Ends it: what others do is not known any more."""
        self.abandon()

    def _open(self, settings: config.Settings) -> None:
        get_job = self.gathering.job
        self._try(
            lambda: publish_at_socket(get_job),
            "keras-dist top does not see this job",
            "KERAS_DIST_TOP=0 leaves it out.",
        )
        if port := settings.top_port:
            remedy = "Choose another port, or leave it out: keras-dist top sees jobs of its node."
            self._try(
                lambda: publish_at_port(get_job, port),
                f"KERAS_DIST_TOP_PORT={port} cannot be used",
                remedy,
            )
        if settings.prometheus_port is not None:
            host, number = settings.prometheus_port
            self._try(
                lambda: _answer_prometheus(get_job, host, number, settings.prometheus_token_file),
                f"KERAS_DIST_PROMETHEUS_PORT={host}:{number} cannot be used",
                "Choose another port, such as the next.",
            )

    def _try(self, make: Callable[[], Any], trouble: str, remedy: str) -> None:
        try:
            self._outlets.append(make())
        except (OSError, errors.LaunchError) as error:
            _log.warning("%s: %s. Training goes on. %s", trouble, error, remedy)

    def _close_outlets(self) -> None:
        global _current
        _current = None
        for outlet in self._outlets:
            outlet.close()
        self._outlets = []


def _answer_prometheus(get_job: Callable[[], Any], host: str, port: int, file: str) -> Any:
    """Opens the port for Prometheus, and says so."""
    from keras_dist.monitor.prometheus import Endpoint

    path = Path(file).expanduser() if file else directory() / PROMETHEUS_TOKEN
    endpoint = Endpoint(get_job, host, port, token_in(path))
    place = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    print(f"keras_dist: Prometheus may read {place} by the token in {path}.", flush=True)
    return endpoint
