"""Messages between ranks that no rank waits for, independent of the collectives.

It works within a node and between nodes, without an open port. One thread uses a mailbox: that of
the collectives, or another one where MPI allows calls from several threads at once.
"""

import time
from collections.abc import Callable
from typing import Any

NAP_SECONDS = 0.5e-3


class Mailbox:
    """Messages from and to one thread of this rank. Collective to make: every rank; blocks."""

    def __init__(self, world: Any):
        self._world = world.Dup()
        self._sent: list[Any] = []
        self._arriving: list[Any] = []

    def post(self, rank: int, message: Any) -> None:
        """Sends an object to another rank. Does not block."""
        self._sent.append(self._world.issend(message, rank))

    def receive(self) -> list[Any]:
        """Returns the objects that have arrived. Does not block."""
        while (message := self._world.improbe()) is not None:
            self._arriving.append(message.irecv())
        self._sent = [request for request in self._sent if not request.test()[0]]
        tested = [(request, *request.test()) for request in self._arriving]
        self._arriving = [request for request, has_arrived, _ in tested if not has_arrived]
        return [message for _, has_arrived, message in tested if has_arrived]

    def close(self, check: Callable[[], None] = lambda: None) -> None:
        """Closes the mailbox; no message is lost. Collective: every rank; blocks.

        A sender knows that its messages have been received (Issend). A rank enters the barrier when
        its messages have been received, and receives those of others until all have entered.
        """
        barrier = None
        while barrier is None or not barrier.Test():
            self.receive()
            if barrier is None and not self._sent:
                barrier = self._world.Ibarrier()
            check()
            time.sleep(NAP_SECONDS)
        self._world.Free()
