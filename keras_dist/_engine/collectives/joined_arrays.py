"""The arrays of a bucket in GPU memory, joined to one array: one operation reduces them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.buckets import Bucket
from keras_dist._gpu import DeviceArray

#: source and target of an operation, what it reads, what it writes, copies before it and after it
Taken = tuple[DeviceArray, DeviceArray, Sequence[DeviceArray], list[DeviceArray], Any]


class JoinedArrays:
    """The arrays of a bucket.

    The framework joins several arrays at once, or the engine copies each before its operation. A
    single array is reduced from where it lies. An error is raised by the methods, which the engine
    calls where an error of one rank is raised on all.
    """

    def __init__(self, bucket: Bucket, arrays: Sequence[DeviceArray]):
        self.arrays = list(arrays)
        self._bucket, self._joiner = bucket, arrays[0].joiner
        self._joined: DeviceArray | Exception | None = None
        if len(arrays) == 1:
            arrays[0].mark()
            arrays[0].prepare()
        elif self._joiner is not None:
            try:
                self._joined = self._join()
            except Exception as error:
                self._joined = error

    def take(self) -> Taken:
        first = self.arrays[0]
        if len(self.arrays) == 1:
            target = first.empty()
            return first, target, (), [target], ((), ())
        if self._joiner is not None:
            flat = self._flat()
            self._joined = None  # the operation writes to it: if it is repeated, they join again
            return flat, flat, (), [flat], ((), ())
        flat = first.empty((self._bucket.count,))
        targets = [array.empty() for array in self.arrays]
        itemsize = self._bucket.dtype.itemsize
        places = [flat.address + slot.offset * itemsize for slot in self._bucket.slots]
        down = [(to, a.address, a.nbytes) for to, a in zip(places, self.arrays, strict=True)]
        up = [(a.address, place, a.nbytes) for place, a in zip(places, targets, strict=True)]
        return flat, flat, self.arrays, targets, (down, up)

    def results(self, targets: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Returns as many arrays as were given, of those that an operation writes."""
        if len(targets) == len(self.arrays) or self._joiner is None:
            return list(targets)
        [flat] = targets
        parts = [self._joiner.part(flat, slot.offset, slot.shape) for slot in self._bucket.slots]
        for part in parts:
            part.completion = flat.completion
        return parts

    def sources(self) -> list[DeviceArray]:
        return self.arrays if self._joiner is None or len(self.arrays) == 1 else [self._flat()]

    def to_host(self) -> list[np.ndarray]:
        return self.unpacked([array.to_host() for array in self.sources()])

    def targets(self) -> list[DeviceArray]:
        return [array.empty() for array in self.sources()]

    def unpacked(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays of the bucket: the given ones, or views of a joined one."""
        return self._bucket.unpack(arrays[0].reshape(-1)) if len(arrays) == 1 else list(arrays)

    def packed(self, flat: np.ndarray) -> list[np.ndarray]:
        """Returns as many arrays as were given, of the fused buffer on the host."""
        if len(self.arrays) == 1:
            return [flat.reshape(self.arrays[0].shape)]
        return self._bucket.unpack(flat)

    def _flat(self) -> DeviceArray:
        if self._joined is None:
            self._joined = self._join()
        if isinstance(self._joined, Exception):
            raise self._joined
        return self._joined

    def _join(self) -> DeviceArray:
        if self._joiner is None:
            raise TypeError("arrays of a framework that joins none")
        offsets = [slot.offset for slot in self._bucket.slots]
        flat = self._joiner.join(self.arrays, offsets, self._bucket.count)
        flat.mark()
        return flat
