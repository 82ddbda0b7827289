"""The ranks of one node that share memory, their barrier, and the watch for their end. Linux."""

import contextlib
import os
import platform
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.buckets import aligned_array
from keras_dist._engine.shm.segments import Segment, clean_up, make_segment
from keras_dist._engine.shm.wait import CAN_SLEEP, Counter, waiting

LINE = 64  # bytes of a cache line: no two ranks write to one line
DIGEST_NBYTES = 16


def namespace() -> str:
    """Returns the kernel's name of the namespace of process numbers; empty if it is unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


class Processes:
    """Processes, watched by file descriptors."""

    def __init__(self, pids: Sequence[int]):
        self._indices: dict[int, int] = {}
        self._dead: list[int] = []
        self._poll = select.poll()
        self._use = threading.Lock()  # a poll object serves one thread at a time
        for index, pid in enumerate(pids):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.append(index)
            except (OSError, AttributeError):
                continue  # an old kernel, or one that forbids it: not watched
            else:
                self._indices[handle] = index
                self._poll.register(handle, select.POLLIN)

    def dead(self) -> list[int]:
        with self._use:
            ended = self._poll.poll(0)
        return sorted(self._dead + [self._indices[handle] for handle, _ in ended])

    def __del__(self) -> None:
        for handle in self._indices:
            os.close(handle)


class ShmBarrier:
    """A barrier of the ranks of a node, which compares their digests.

    Each rank has a counter of its barriers and two slots for a digest, used in turn. A rank that
    has left barrier k may write the digest of barrier k + 1 into the other slot. It writes to the
    first slot again in barrier k + 2, which it enters only after all ranks have left barrier k,
    that is, have read its digests.
    """

    LINES = 3  # counter, two digests

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        check: Callable[[], None],
        fence: Callable[[], None] | None = None,
    ):
        self._check, self._fence = check, fence
        end = self.nbytes_for(size)
        self._left = segment.memory[end - LINE : end].data
        lines = segment.memory[: end - LINE].reshape(size, self.LINES, LINE)
        self._counters = [Counter(lines[r, 0, :4].view(np.uint32), fence) for r in range(size)]
        self._mine = self._counters[rank]
        self._others = [c for r, c in enumerate(self._counters) if r != rank]
        self._views = [counter.view for counter in self._others]
        digests: list[list[Any]] = [
            [lines[r, 1 + turn, :DIGEST_NBYTES].data for r in range(size)] for turn in range(2)
        ]
        self._my_digests = [row.pop(rank) for row in digests]
        self._other_digests = digests
        self._count = 0

    @classmethod
    def nbytes_for(cls, size: int) -> int:
        """Returns the size in bytes of the barrier of `size` ranks."""
        return (size * cls.LINES + 1) * LINE

    def leave(self) -> None:
        """Releases ranks that wait here, now or later: not all ranks will arrive."""
        self._left[0] = 1
        for counter in self._counters:
            counter.wake()

    def wait(self, digest: bytes) -> bool:
        """Waits until all ranks of the node have arrived."""
        self._arrive(digest)
        count = self._count
        for view in self._views:
            if (view[0] - count) % 2**32 >= 2**31:  # `has_reached`, in line: this is the short path
                self._wait()
                break
        return self._agree(digest)

    def start(self, digest: bytes) -> Callable[[], bool | None]:
        """Starts `wait`; returns a function of its answer, `None` while a rank is missing."""
        self._arrive(digest)

        def answer() -> bool | None:
            if all(counter.has_reached(self._count) for counter in self._others):
                return self._agree(digest)
            self._check_alive()
            return None

        return answer

    def _wait(self) -> None:
        with waiting:  # one wait, whichever ranks are missing
            for counter in self._others:
                counter.wait_for(self._count, self._check_alive)

    def _check_alive(self) -> None:
        if self._left[0]:
            raise errors.RankLostError("Another rank of this node has seen a rank die.")
        self._check()

    def _arrive(self, digest: bytes) -> None:
        self._count = (self._count + 1) % 2**32
        self._my_digests[self._count % 2][:] = digest
        self._mine.raise_to(self._count)

    def _agree(self, digest: bytes) -> bool:
        if self._fence is not None:
            self._fence()
        others = self._other_digests[self._count % 2]
        return others.count(digest) == len(others)


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
    """Makes the shared memory of a node, or returns the reason. Collective: its ranks."""
    if not CAN_SLEEP:
        return None, f"keras_dist does not know how to wait in it on {platform.machine()}"
    clean_up()
    segment, reason = make_segment(ShmBarrier.nbytes_for(size), rank, allgather)
    if segment is None:
        return None, reason
    pids, namespaces = zip(*allgather((os.getpid(), namespace())), strict=True)
    # In two namespaces one number may mean two processes.
    known = len(set(namespaces)) == 1 and bool(namespaces[0])
    processes = Processes(pids if known else ())

    def check() -> None:
        if dead := processes.dead():
            raise lost(dead)
        poll()

    barrier = ShmBarrier(segment, rank, size, check, fence)
    return Node(rank, size, allgather, barrier, processes.dead), None
