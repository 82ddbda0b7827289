"""Lifecycle events of the job. Packages above `runtime` subscribe; `runtime` imports none of them.

Every handler runs on every rank, in the order of subscription, and may call collectives.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_dist._engine import Communicator

__all__ = ["JOB_ENDING", "JOB_JOINED", "JOB_STARTED", "publish", "subscribe"]

JOB_JOINED = "job joined"  # the ranks have found each other; an error ends `init`
JOB_STARTED = "job started"  # `init` has succeeded
JOB_ENDING = "job ending"  # `shutdown`, or the end of the script; all ranks still answer

_handlers: defaultdict[str, list[Callable[["Communicator"], None]]] = defaultdict(list)


def subscribe(event: str, handler: "Callable[[Communicator], None]") -> None:
    """Calls a function at each such event.

    Args:
        event: one of the events of this module.
        handler: is given the communicator of all ranks.
    """
    _handlers[event].append(handler)


def publish(event: str, comm: "Communicator") -> None:
    """Calls the handlers of an event. Collective: every rank; blocks.

    Args:
        event: one of the events of this module.
        comm: the ranks of the job.
    """
    for handler in _handlers[event]:
        handler(comm)
