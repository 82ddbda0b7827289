"""What runs beside the collectives of a communicator, and closes with it.

A background service, such as the stall watchdog, starts again among the remaining ranks after a
rank has died.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

C = TypeVar("C")  # a communicator


class BackgroundService(Protocol):
    """A service that runs beside the collectives."""

    def close(self) -> None:
        """Ends the service. Collective: every rank; blocks."""

    def abandon(self) -> None:
        """Ends the service after a rank has died, without waiting for other ranks."""

    def stop_communication(self) -> None:
        """Sends no more messages, as a rank has died; `abandon` follows."""


class Services(Generic[C]):
    """The services of one communicator."""

    def __init__(self, comm: C):
        self._comm = comm
        self._factories: list[Callable[[C], BackgroundService]] = []
        self._running: list[BackgroundService] = []

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

    def close(self, wait: bool = True) -> None:
        """Closes all services. Collective: every rank; blocks."""
        if wait:
            for service in self._running:
                service.close()
            self._running = []
        else:
            self._abandon()

    def _abandon(self) -> None:
        for service in self._running:
            service.abandon()
        self._running = []
