"""Messages between the ranks that nobody waits for, beside whatever else the ranks do.

One way for one node and for several, without an open port. It needs MPI calls from several threads
at once. Knows MPI's communicators by what they can do.
"""

import time
from typing import Any

__all__ = ["Mailbox"]

NAP_SECONDS = 0.5e-3


class Mailbox:
    """The messages of this rank, of a thread of its own. Collective: every rank makes one; blocks.

    Args:
        world: the MPI communicator of the ranks; it is duplicated.
    """

    def __init__(self, world: Any):
        self._world = world.Dup()
        self._sent: list[Any] = []
        self._coming: list[Any] = []

    def post(self, rank: int, message: Any) -> None:
        """Sends an object to another rank; does not wait."""
        self._sent.append(self._world.issend(message, rank))

    def receive(self) -> list[Any]:
        """Returns the objects that have come; does not wait."""
        while (message := self._world.improbe()) is not None:
            self._coming.append(message.irecv())
        self._sent = [request for request in self._sent if not request.test()[0]]
        tested = [(request, *request.test()) for request in self._coming]
        self._coming = [request for request, has_come, _ in tested if not has_come]
        return [message for _, has_come, message in tested if has_come]

    def close(self) -> None:
        """Ends it; no message is left behind. Collective: every rank; blocks.

        Every message is known to its sender to have been received (Issend); a rank comes to the
        barrier when its own have been, and receives those of others until all have come.
        """
        barrier = None
        while barrier is None or not barrier.Test():
            self.receive()
            if barrier is None and not self._sent:
                barrier = self._world.Ibarrier()
            time.sleep(NAP_SECONDS)
        self._world.Free()
