"""Memory that is used again: of results, and of the rows that ranks exchange; idle memory."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_dist._engine.buckets import aligned_array, size_class
from keras_dist._engine.shm.segments import Segment

MAX_POOL_NBYTES = 256 * 2**20
MAX_OF_A_SIZE = 4
IDLE_UPDATES = 100


class ResultMemory:
    """Memory of the results of repeated calls, as new memory costs page faults."""

    def __init__(self, count: int, dtype: np.dtype):
        self._count, self._dtype = count, dtype
        self._memory: memoryview | None = None
        self._base: weakref.ref[np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def is_held(self) -> bool:
        return self._base is not None and self._base() is not None

    def take(self) -> np.ndarray:
        """Returns a flat array that nothing else refers to; it starts on a cache line."""
        if self._memory is None or self.is_held:
            # Zeros: the gaps between arrays of a bucket are reduced as well.
            new = aligned_array(self._count, self._dtype, np.zeros)
            self._memory = new.view(np.uint8).data
        # A base of its own, kept alive by all its views and by tensors that a framework makes.
        base = np.frombuffer(self._memory, np.uint8)
        self._base = weakref.ref(base)
        return base.view(self._dtype)


class ResultPool:
    """Memory of the results of single calls, by size.

    A script that assigns each result to the same name holds one while it calls for the next, so
    there are several of each size.
    """

    def __init__(self) -> None:
        # The least recently used first.
        self._by_size: dict[int, list[ResultMemory]] = {}

    def take(self, nbytes: int) -> np.ndarray:
        """Returns uint8 memory that nothing else refers to; it starts on a cache line."""
        capacity = size_class(nbytes)
        several = self._by_size.pop(capacity, [])
        self._by_size[capacity] = several
        free = next((memory for memory in several if not memory.is_held), None)
        if free is None:
            del several[: len(several) + 1 - MAX_OF_A_SIZE]
            free = ResultMemory(capacity, np.dtype(np.uint8))
            several.append(free)
        taken = free.take()[:nbytes]
        self._drop_oldest()
        return taken

    def _drop_oldest(self) -> None:
        nbytes = sum(memory.nbytes for several in self._by_size.values() for memory in several)
        while nbytes > MAX_POOL_NBYTES:
            size = next(iter(self._by_size))
            if len(self._by_size) == 1 and len(self._by_size[size]) == 1:
                return  # it is likely to be used again
            nbytes -= self._by_size[size].pop(0).nbytes
            if not self._by_size[size]:
                del self._by_size[size]


class RowMemory:
    """The shared memory of rows, and the memory of their sums, of one communicator.

    Exchanges differ in size, so memory grows when it is too small. A rank writes to the rows of an
    exchange again only after the rendezvous of the next one, when all ranks have read them.
    """

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        self._segment: Segment | None = None
        self._results: dict[str | None, tuple[int, ResultMemory]] = {}

    def shared(self, nbytes: int, make: Callable[[int], Segment | None]) -> np.ndarray | None:
        """Returns memory that all ranks of a node see, if there is any. Collective: all nodes."""
        if self._segment is None or self._segment.memory.size < nbytes:
            self._segment = None  # before the new one: both may not fit
            self._segment = make(_with_reserve(nbytes))
        return None if self._segment is None else self._segment.memory[:nbytes]

    def result(self, table: str | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array that nothing else refers to; its memory is used again afterwards."""
        nbytes = math.prod(shape) * dtype.itemsize
        capacity, memory = self._results.get(table, (0, None))
        if memory is None or capacity < nbytes:
            capacity = _with_reserve(nbytes)
            memory = ResultMemory(capacity, np.dtype(np.uint8))
            self._results[table] = capacity, memory
        return memory.take()[:nbytes].view(dtype).reshape(shape)


def _with_reserve(nbytes: int) -> int:
    """Returns a size with a reserve, as the number of rows varies from step to step."""
    return nbytes + nbytes // 4 + 1


class IdleMemory:
    """The plans of one communicator that hold memory, and their last use.

    When the trainable variables of a model change, its gradients get a plan with memory of its own.
    A plan that has been idle for `IDLE_UPDATES` releases its memory, and allocates new memory if it
    is used again. Updates are counted after a rendezvous, so all ranks release the same memory at
    the same update, without a message.
    """

    def __init__(self) -> None:
        # Least recently used first. A plan without other references frees its memory by itself.
        self._last_uses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._updates = 0

    def used(self, plan: Any, is_update: bool = True) -> None:
        """Counts an update by a plan, and releases plans that have been idle for too long."""
        self._updates += is_update
        self._last_uses.pop(plan, None)
        self._last_uses[plan] = self._updates
        for idle in list(self._last_uses):
            if self._updates - self._last_uses[idle] <= IDLE_UPDATES:
                break
            del self._last_uses[idle]
            idle.release()

    def clear(self) -> None:
        for plan in list(self._last_uses):
            plan.release()
        self._last_uses.clear()
