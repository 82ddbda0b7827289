"""Staging of GPU arrays in pinned memory, piece by piece.

While the host reduces one piece, the GPU copies the next one down and the last one up. Only pinned
memory is used: for other memory the driver makes a second copy, and the host waits for it.
"""

import collections
import contextlib
import functools
from collections.abc import Sequence

import numpy as np

from keras_dist._gpu.arrays import DeviceArray
from keras_dist._gpu.runtime import Event, Runtime

ALIGNMENT = 64  # bytes: a cache line


class Half:
    """Pinned memory for a piece; results of two pieces are copied up at a time."""

    def __init__(self, memory: np.ndarray, arrays: Sequence[DeviceArray]):
        self.memory = memory
        self.filled: Event | None = None  # after the copies down
        self.free: Event | None = None  # after the copies up
        self.arrays = list(arrays)  # kept while they are copied

    def __del__(self) -> None:
        # The GPU may still copy from and to the memory, which others get next.
        with contextlib.suppress(Exception):  # of work that has failed
            self.wait()

    def wait(self) -> None:
        """Waits for the copies into and out of this memory, also of work that was given up."""
        for event in (self.filled, self.free):
            if event is not None:
                event.wait()

    def views(self, arrays: Sequence[DeviceArray]) -> list[np.ndarray]:
        """Returns the places of arrays in this memory, as arrays."""
        found, start = [], 0
        for array in arrays:
            flat = self.memory[start : start + array.nbytes].view(array.dtype)
            found.append(flat.reshape(array.shape))
            start += _aligned(array.nbytes)
        return found


class Staging:
    """Copies arrays down to the host and results up again, for all that a process reduces."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._rising: collections.deque[Half] = collections.deque()  # with copies up

    def down(self, arrays: Sequence[DeviceArray]) -> Half:
        """Starts to copy arrays into pinned memory, after the work that writes them.

        Blocks while the results of the call before the last are copied up: their memory is next.
        """
        while len(self._rising) > 1:
            with contextlib.suppress(IndexError):  # another thread has taken it
                self._rising.popleft().wait()
        nbytes = sum(_aligned(array.nbytes) for array in arrays)
        half, stream = Half(self._runtime.pinned(nbytes), arrays), self._runtime.copies
        for array, view in zip(arrays, half.views(arrays), strict=True):
            array.hold(stream)
            self._runtime.copy(view.ctypes.data, array.address, array.nbytes, stream)
        half.filled = self._runtime.event(stream)
        return half

    def host_arrays(self, half: Half) -> list[np.ndarray]:
        """Waits for the copies of `down`; returns the arrays in pinned memory."""
        if half.filled is not None:
            half.filled.wait()
        return half.views(half.arrays)

    def up(
        self,
        half: Half,
        results: Sequence[np.ndarray],
        views: Sequence[np.ndarray],
        targets: Sequence[DeviceArray],
    ) -> None:
        """Starts to copy results, by way of the memory of `down`, into new arrays on the GPU."""
        for result, view in zip(results, views, strict=True):
            if result.ctypes.data != view.ctypes.data:
                np.copyto(view, result)
        stream = self._runtime.copies
        half.arrays = list(targets)
        for view, target in zip(half.views(targets), targets, strict=True):
            target.hold(stream)
            self._runtime.copy(target.address, view.ctypes.data, target.nbytes, stream)
        half.free = self._runtime.event(stream)
        for target in targets:
            target.completion = half.free
        self._rising.append(half)


@functools.cache
def staging_of(runtime: Runtime) -> Staging:
    """Returns the staging of a GPU, whose memory all reductions share."""
    return Staging(runtime)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
