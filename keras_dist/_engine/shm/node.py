"""The ranks of one node that share memory, and where they meet in it. Knows no MPI."""

import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.faults.processes import Processes, namespace
from keras_dist._engine.shm import process_vm
from keras_dist._engine.shm.segments import Segment, ShmBarrier, clean_up, make_segment

__all__ = ["Node", "join_node"]


class Node:
    """The ranks of a node, their meeting place and the way in which they reduce.

    Args:
        rank: this rank on the node.
        size: the number of ranks on the node.
        share: gives every rank's object to all ranks of the node, in rank order.
        place: where they meet.
        pids: their processes.
        may_read: whether ranks read each other's memory.
        dead: tells which of them have ended, by their places.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        share: Callable[[Any], list[Any]],
        place: ShmBarrier,
        pids: Sequence[int],
        may_read: bool,
        dead: Callable[[], list[int]],
    ):
        self.rank = rank
        self.size = size
        self.share = share
        self.meet, self.come, self.leave = place.meet, place.come, place.leave
        self.pids = pids
        self.may_read = may_read
        self.dead = dead
        self._scratch = np.empty(0, np.uint8)

    def scratch(self, nbytes: int) -> np.ndarray:
        """Returns private memory for what lasts no longer than a call; always the same."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    def segment(self, nbytes: int, windows: bool = False) -> tuple[Segment | None, str | None]:
        """Makes a segment for all ranks of the node. Collective. See `make_segment`."""
        return make_segment(nbytes, self.rank, self.share, windows)


def join_node(
    rank: int,
    size: int,
    share: Callable[[Any], list[Any]],
    read: bool,
    lost: Callable[[list[int]], Exception],
    look: Callable[[], None],
) -> tuple[Node | None, str | None]:
    """Brings the ranks of a node together in shared memory.

    Collective: every rank of the node.

    Args:
        rank: this rank on the node.
        size: the number of ranks on the node.
        share: gives every rank's object to all ranks of the node, in rank order.
        read: whether ranks should read each other's memory, where the kernel lets them.
        lost: makes the error for ranks of the node that have died.
        look: called now and then by a rank that waits in a meeting.

    Returns:
        The node and `None`; or `None` and the reason why there is no shared memory.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        # Elsewhere what one core writes may be seen by others in another order, and Python has
        # no fence against that.
        return None, f"it relies on the order of stores of x86, and this is {platform.machine()}"
    clean_up()
    segment, trouble = make_segment(ShmBarrier.nbytes_for(size), rank, share)
    if segment is None:
        return None, trouble
    may_read = read and process_vm.can_read_all(share)
    pids, namespaces = zip(*share((os.getpid(), namespace())), strict=True)
    known = len(set(namespaces)) == 1 and bool(namespaces[0])
    processes = Processes(pids if known else ())

    def check() -> None:
        if dead := processes.dead():
            raise lost(dead)
        look()

    place = ShmBarrier(segment, rank, size, check)
    return Node(rank, size, share, place, pids, may_read, processes.dead), None
