"""The ranks of one node that share memory. Independent of MPI."""

import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_dist._engine.buckets import aligned_array
from keras_dist._engine.shm.processes import Processes, namespace
from keras_dist._engine.shm.segments import Segment, ShmBarrier, clean_up, make_segment
from keras_dist._engine.shm.wait import CAN_SLEEP


class Node:
    """The ranks of a node, and their barrier in shared memory."""

    def __init__(
        self,
        rank: int,
        size: int,
        allgather: Callable[[Any], list[Any]],
        barrier: ShmBarrier,
        dead: Callable[[], list[int]],
    ):
        self.rank = rank
        self.size = size
        self.allgather = allgather
        self.barrier, self.start, self.leave = barrier.wait, barrier.start, barrier.leave
        self.dead = dead
        self._scratch: dict[str, np.ndarray] = {}

    def scratch(self, nbytes: int, use: str = "copies") -> np.ndarray:
        """Returns private memory for the duration of a call; the same for each use."""
        memory = self._scratch.get(use)
        if memory is None or memory.nbytes < nbytes:
            self._scratch[use] = memory = aligned_array(nbytes, np.dtype(np.uint8))
        return memory[:nbytes]

    def segment(self, nbytes: int, private_view: bool = False) -> tuple[Segment | None, str | None]:
        """Makes a segment for all ranks of the node. Collective. See `make_segment`."""
        return make_segment(nbytes, self.rank, self.allgather, private_view)


def attach_node(
    rank: int,
    size: int,
    allgather: Callable[[Any], list[Any]],
    lost: Callable[[list[int]], Exception],
    poll: Callable[[], None],
    fence: Callable[[], None] | None = None,
) -> tuple[Node | None, str | None]:
    """Allocates the shared memory of the ranks of a node.

    Collective: every rank of the node.

    Returns:
        The node and `None`, or `None` and the reason why there is no shared memory.
    """
    if not CAN_SLEEP:
        return None, f"keras_dist does not know how to wait in it on {platform.machine()}"
    clean_up()
    segment, reason = make_segment(ShmBarrier.nbytes_for(size), rank, allgather)
    if segment is None:
        return None, reason
    pids, namespaces = zip(*allgather((os.getpid(), namespace())), strict=True)
    known = len(set(namespaces)) == 1 and bool(namespaces[0])
    processes = Processes(pids if known else ())

    def check() -> None:
        if dead := processes.dead():
            raise lost(dead)
        poll()

    barrier = ShmBarrier(segment, rank, size, check, fence)
    return Node(rank, size, allgather, barrier, processes.dead), None
