"""Monitoring of a job: reports of the ranks, the endpoints that serve them, and the timeline.

```
 rank 1 ── report ──┐ MPI, on request
 rank 0 ── report ──┴─ collector ── server: Unix socket, port ── keras-dist top, browser, Prometheus
                             └───── callbacks.WriteScalars: TensorBoard
```
"""

from typing import TYPE_CHECKING

from keras_dist import config
from keras_dist.runtime import events

if TYPE_CHECKING:
    from keras_dist._engine import Communicator

__all__ = ["subscribe"]


def subscribe() -> None:
    """Subscribes to the events with which the timeline, endpoints and others start and end."""
    events.subscribe(events.JOB_INITIALIZED, _begin_timeline)
    events.subscribe(events.JOB_STARTED, _start_telling)
    events.subscribe(events.JOB_ENDING, _end_timeline)


def _begin_timeline(comm: "Communicator") -> None:
    if config.settings().timeline:
        from keras_dist.monitor.timeline.recording import begin_recording

        begin_recording(comm, config.settings().timeline)


def _start_telling(comm: "Communicator") -> None:
    if config.settings().top:
        from keras_dist.monitor.endpoints import Endpoints

        comm.services.start(Endpoints)
    if config.settings().standby_server:
        from keras_dist.monitor.imports import tell_imports

        tell_imports()


def _end_timeline(comm: "Communicator") -> None:
    from keras_dist.monitor.timeline.recording import end_recording

    end_recording(comm)
