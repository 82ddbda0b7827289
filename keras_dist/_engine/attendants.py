"""What goes on beside the ranks, such as the watch, and ends with them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from keras_dist._engine.communicator import Communicator

__all__ = ["Attendant", "Attendants"]


class Attendant(Protocol):
    """One that goes on beside the ranks."""

    def close(self) -> None:
        """Ends it. Collective: every rank; blocks."""

    def abandon(self) -> None:
        """Ends it where a rank has died, so that no others can be waited for."""


class Attendants:
    """Those of one communicator; they begin again among the others where a rank has died."""

    def __init__(self) -> None:
        self._begin: list[Callable[[Communicator], Attendant]] = []
        self._present: list[Attendant] = []

    def add(self, comm: "Communicator", begin: "Callable[[Communicator], Attendant]") -> None:
        """Lets one begin, now and again after each loss. Collective: every rank; blocks."""
        self._begin.append(begin)
        self._present.append(begin(comm))

    def begin_again(self, comm: "Communicator") -> None:
        """Lets all begin among these ranks. Collective: every rank; blocks."""
        self._present = [begin(comm) for begin in self._begin]

    def close(self) -> None:
        """Ends them. Collective: every rank; blocks."""
        self._end(lambda attendant: attendant.close())

    def abandon(self) -> None:
        """Ends them and waits for no other rank."""
        self._end(lambda attendant: attendant.abandon())

    def _end(self, end: "Callable[[Attendant], None]") -> None:
        for attendant in self._present:
            end(attendant)
        self._present = []
