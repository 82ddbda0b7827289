"""What goes on beside the ranks, such as the watch, and ends with them."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["BackgroundService", "BackgroundServices"]

C = TypeVar("C")  # a communicator


class BackgroundService(Protocol):
    """One that goes on beside the ranks."""

    def close(self) -> None:
        """Ends it. Collective: every rank; blocks."""

    def abandon(self) -> None:
        """Ends it where a rank has died, so that no others can be waited for."""

    def be_alone(self) -> None:
        """Speaks to no other rank any more, as one has died; `abandon` follows."""


class BackgroundServices(Generic[C]):
    """Those of one communicator; they begin again among the others where a rank has died."""

    def __init__(self) -> None:
        self._begin: list[Callable[[C], BackgroundService]] = []
        self._present: list[BackgroundService] = []

    def add(self, comm: C, begin: Callable[[C], BackgroundService]) -> None:
        """Lets one begin, now and again after each loss. Collective: every rank; blocks."""
        self._begin.append(begin)
        self._present.append(begin(comm))

    def begin_again(self, comm: C) -> None:
        """Ends those before and lets all begin among these ranks. Collective; blocks."""
        self.abandon()
        for begin in self._begin:  # one of these ranks may die before the last has begun
            self._present.append(begin(comm))

    def be_alone(self) -> None:
        """Lets them speak to no other rank until they begin again."""
        for attendant in self._present:
            attendant.be_alone()

    def close(self) -> None:
        """Ends them. Collective: every rank; blocks."""
        self._end(lambda attendant: attendant.close())

    def abandon(self) -> None:
        """Ends them and waits for no other rank."""
        self._end(lambda attendant: attendant.abandon())

    def _end(self, end: Callable[[BackgroundService], None]) -> None:
        for attendant in self._present:
            end(attendant)
        self._present = []
