"""Memory of results that is used again once nobody holds them: new memory costs page faults."""

import weakref

import numpy as np

from keras_dist._engine.buckets import aligned_array, size_class

MAX_POOL_NBYTES = 256 * 2**20
MAX_OF_A_SIZE = 4


class ResultMemory:
    """Memory of the results of repeated calls.

    Every result has a base of its own, which all its views keep alive, and tensors that a framework
    makes of them.
    """

    def __init__(self, count: int, dtype: np.dtype):
        self._count, self._dtype = count, dtype
        self._memory: memoryview | None = None
        self._base: weakref.ref[np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that is kept."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def is_held(self) -> bool:
        """Returns whether the last result is still held."""
        return self._base is not None and self._base() is not None

    def take(self) -> np.ndarray:
        """Returns a flat array that nothing else refers to; it starts on a cache line."""
        if self._memory is None or self.is_held:
            # Zeros: the gaps between arrays of a bucket are reduced as well.
            new = aligned_array(self._count, self._dtype, np.zeros)
            self._memory = new.view(np.uint8).data
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
