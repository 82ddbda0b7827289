"""Memory of results that is used again once nobody holds them: new memory costs page faults."""

import weakref

import numpy as np

from keras_dist._engine.buckets import aligned_array

__all__ = ["ResultMemory"]


class ResultMemory:
    """Memory of the results of repeated calls.

    Every result has a base of its own, which all its views keep alive, and tensors that a framework
    makes of them.

    Args:
        count: number of elements of a result.
        dtype: their dtype.
    """

    def __init__(self, count: int, dtype: np.dtype):
        self._count, self._dtype = count, dtype
        self._memory: memoryview | None = None
        self._base: weakref.ref[np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that is kept."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self) -> np.ndarray:
        """Returns a flat array that nothing else refers to; it starts on a cache line."""
        if self._memory is None or (self._base is not None and self._base() is not None):
            # Zeros: the gaps between arrays of a bucket are reduced as well.
            new = aligned_array(self._count, self._dtype, np.zeros)
            self._memory = new.view(np.uint8).data
        base = np.frombuffer(self._memory, np.uint8)
        self._base = weakref.ref(base)
        return base.view(self._dtype)
