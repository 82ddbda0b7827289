"""The check before every collective: do all ranks bring the same digest?"""

import time
from collections.abc import Callable

import numpy as np

from keras_dist._engine.mpi.topology import Topology
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.wait import waiting

__all__ = ["NAP_SECONDS", "SPIN_SECONDS", "DigestExchange"]

SPIN_SECONDS = 100e-6  # polls this long before it yields the core
NAP_SECONDS = 50e-6


class DigestExchange:
    """Compares digests of all ranks: in shared memory on one node, through MPI on several.

    Args:
        topology: the ranks.
        node: shared memory of the ranks of this node, if there is any.
        decline: called while this rank waits: answers ranks that wait for it elsewhere.
    """

    def __init__(self, topology: Topology, node: Node | None, decline: Callable[[], None]):
        self._world, self._size = topology.world, topology.size
        self._node = node if topology.is_one_node else None
        self._decline = decline
        self.count = 0  # exchanges so far; equal on all ranks

    def compare(self, digest: bytes) -> bool:
        """Waits for all ranks and returns whether all brought the same digest. Collective; blocks.

        A rank spins briefly and then sleeps, so that a rank that still computes gets the core.

        Args:
            digest: 16 bytes.

        Returns:
            The same answer on all ranks.
        """
        if self._node is not None:
            self.count += 1
            return self._node.meet(digest)
        answer = self.start(digest)
        with waiting:
            start = time.perf_counter()
            while (same := answer()) is None:
                if time.perf_counter() - start > SPIN_SECONDS:
                    time.sleep(NAP_SECONDS)
        return same

    def start(self, digest: bytes) -> Callable[[], bool | None]:
        """Starts `compare` without waiting. Collective.

        Args:
            digest: 16 bytes.

        Returns:
            Function that returns the answer of `compare`, or `None` while a rank is missing.
        """
        self.count += 1
        if self._node is not None:
            return self._node.start(digest)
        mine = np.frombuffer(digest, np.uint8)
        digests = np.empty((self._size, mine.size), np.uint8)
        request = self._world.Iallgather(mine, digests)

        def answer() -> bool | None:
            if request.Test():
                return bool((digests == digests[0]).all())
            self._decline()
            return None

        return answer
