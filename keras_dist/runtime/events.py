"""Lifecycle events of the job, to which packages above `runtime` subscribe.

Handlers run on every rank, in the order of subscription, and may call collectives.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_dist._engine import Communicator

JOB_INITIALIZED = "job initialized"  # the ranks are connected; an error makes `init` fail
JOB_STARTED = "job started"  # `init` has succeeded
JOB_ENDING = "job ending"  # `shutdown`, or the end of the script; all ranks are still connected

_handlers: defaultdict[str, list[Callable[["Communicator"], None]]] = defaultdict(list)


def subscribe(event: str, handler: "Callable[[Communicator], None]") -> None:
    """Registers a handler for an event."""
    _handlers[event].append(handler)


def publish(event: str, comm: "Communicator") -> None:
    """Calls the handlers of an event. Collective: every rank; blocks."""
    for handler in _handlers[event]:
        handler(comm)
