"""What runs beside the collectives of a communicator, and closes with it.

A background service, such as the stall watchdog, starts again among the remaining ranks after a
rank has died. A resource, such as a file that all ranks have open, closes at the end of the job.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

C = TypeVar("C")  # a communicator


class BackgroundService(Protocol):
    """A service that runs beside the collectives."""

    def close(self) -> None:
        """Ends the service. Collective: every rank; blocks."""

    def abandon(self) -> None:
        """Ends the service after a rank has died, without waiting for other ranks."""

    def stop_communication(self) -> None:
        """Sends no more messages, as a rank has died; `abandon` follows."""


class _Resource(Protocol):
    """Something to close at the end of the job."""

    def close(self) -> None:
        """Closes it. Collective: every rank; blocks."""


class Services(Generic[C]):
    """The services and resources of one communicator."""

    def __init__(self, comm: C):
        self._comm = comm
        self._factories: list[Callable[[C], BackgroundService]] = []
        self._running: list[BackgroundService] = []
        self._resources: list[_Resource] = []
        self._channels = 0
        self._channel_world: Any | None = None

    def start(self, factory: Callable[[C], BackgroundService]) -> None:
        """Starts a background service, now and after each loss of a rank. Collective; blocks."""
        self._factories.append(factory)
        self._running.append(factory(self._comm))

    def restart(self) -> None:
        """Abandons the running services and starts all again. Collective; blocks."""
        self._abandon()
        for factory in self._factories:  # one at a time: a rank may die in between
            self._running.append(factory(self._comm))

    def detach(self) -> None:
        """Makes the services send no more messages until `restart`."""
        for service in self._running:
            service.stop_communication()
        self._channel_world = None

    def add_resource(self, resource: _Resource) -> None:
        """Registers a resource to close at the end of the job."""
        self._resources.append(resource)

    def remove_resource(self, resource: _Resource) -> None:
        """Removes a resource that has been closed, if it is registered."""
        if resource in self._resources:
            self._resources.remove(resource)

    def channel(self, world: Any) -> tuple[Any, int]:
        """Returns a place for messages of threads. Collective: every rank; blocks."""
        if self._channel_world is None:
            self._channel_world = world.Dup()
        self._channels += 1
        return self._channel_world, self._channels - 1

    def close(self, wait: bool = True) -> None:
        """Closes all resources, then all services. Collective: every rank; blocks."""
        for resource in list(self._resources):
            resource.close()
        self._resources.clear()
        if wait:
            for service in self._running:
                service.close()
            self._running = []
        else:
            self._abandon()

    def detach_channel_world(self) -> Any | None:
        """Returns the duplicate of `channel`, to be freed, and forgets it."""
        world, self._channel_world = self._channel_world, None
        return world

    def _abandon(self) -> None:
        for service in self._running:
            service.abandon()
        self._running = []
