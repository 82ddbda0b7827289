"""Staging of GPU arrays in pinned memory, of which there are two halves.

While the host reduces what is in one half, the GPU copies into or out of the other. Only pinned
memory is used: for other memory the driver makes a second copy, and the host waits for it.
"""

import contextlib
from collections.abc import Sequence

import numpy as np

from keras_dist._gpu.arrays import DeviceArray
from keras_dist._gpu.runtime import Event, Runtime

__all__ = ["Half", "Staging"]

ALIGNMENT = 64  # bytes: a cache line


class Half:
    """A half of the pinned memory; grows with what it stages."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)
        self.filled: Event | None = None  # after the copies down
        self.free: Event | None = None  # after the copies up
        self.arrays: list[DeviceArray] = []  # kept while they are copied

    def __del__(self) -> None:
        # The GPU may still copy from and to the memory, which others get next.
        with contextlib.suppress(Exception):  # of work that has failed
            self.wait()

    def wait(self) -> None:
        """Waits for the copies into and out of this half, also of work that was given up."""
        for event in (self.filled, self.free):
            if event is not None:
                event.wait()

    def views(self, arrays: Sequence[DeviceArray]) -> list[np.ndarray]:
        """Returns the places of arrays in this half, as arrays."""
        found, start = [], 0
        for array in arrays:
            flat = self.memory[start : start + array.nbytes].view(array.dtype)
            found.append(flat.reshape(array.shape))
            start += _aligned(array.nbytes)
        return found


class Staging:
    """Copies arrays down to the host and results up again.

    Args:
        runtime: the runtime of the GPU.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._halves = Half(), Half()
        self._turn = 0

    def down(self, arrays: Sequence[DeviceArray]) -> Half:
        """Starts to copy arrays into the next half, after the work that writes them.

        Blocks while arrays of the call before the last are still copied into or from that half.
        """
        half = self._halves[self._turn]
        self._turn = 1 - self._turn
        half.wait()
        half.arrays = list(arrays)
        nbytes = sum(_aligned(array.nbytes) for array in arrays)
        if half.memory.nbytes < nbytes:
            half.memory = self._runtime.pinned(nbytes)
        stream = self._runtime.copies
        for array, view in zip(arrays, half.views(arrays), strict=True):
            array.hold(stream)
            self._runtime.copy(view.ctypes.data, array.address, array.nbytes, stream)
        half.filled = self._runtime.event(stream)
        return half

    def host_arrays(self, half: Half, arrays: Sequence[DeviceArray]) -> list[np.ndarray]:
        """Waits for the copies of `down`; returns the arrays in the half."""
        if half.filled is not None:
            half.filled.wait()
        return half.views(arrays)

    def up(
        self,
        half: Half,
        results: Sequence[np.ndarray],
        views: Sequence[np.ndarray],
        targets: Sequence[DeviceArray],
    ) -> None:
        """Starts to copy results, by way of a half, into new arrays on the GPU.

        Args:
            half: the half.
            results: the results.
            views: the place of each result in the half.
            targets: the new arrays, laid out in the half one after the other.
        """
        for result, view in zip(results, views, strict=True):
            if result.ctypes.data != view.ctypes.data:
                np.copyto(view, result)
        stream = self._runtime.copies
        half.arrays += targets
        for view, target in zip(half.views(targets), targets, strict=True):
            target.hold(stream)
            self._runtime.copy(target.address, view.ctypes.data, target.nbytes, stream)
        half.free = self._runtime.event(stream)
        for target in targets:
            target.completion = half.free


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
