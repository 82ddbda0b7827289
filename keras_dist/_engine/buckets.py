"""The bucket plan: which arrays travel together, and where in the fused buffer. Pure.

A plan depends on shapes, dtypes and the bucket size alone, so every rank that holds the
same arrays makes the same plan without talking to the others.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["Bucket", "Slot", "plan_buckets"]

ALIGNMENT = 64  # bytes: a cache line, and what TensorFlow asks of a buffer it takes as it is


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one array in a fused buffer.

    Args:
        index: the array's position in the list that was planned.
        shape: its shape.
        offset: where it starts in the buffer, in elements.
        count: how many elements it has.
    """

    index: int
    shape: tuple[int, ...]
    offset: int
    count: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Arrays of one dtype that are reduced in one go.

    Args:
        dtype: their dtype.
        slots: their places, in the order they were planned.
        count: elements of the fused buffer, gaps for alignment included.
    """

    dtype: np.dtype
    slots: tuple[Slot, ...]
    count: int

    def pack(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Copies arrays, one for each slot and in their order, into a new fused buffer."""
        buffer = np.zeros(self.count, self.dtype)
        self.pack_into(buffer, arrays)
        return buffer

    def pack_into(self, buffer: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Copies arrays, one for each slot and in their order, into a fused buffer."""
        for slot, array in zip(self.slots, arrays, strict=True):
            buffer[slot.offset : slot.offset + slot.count] = array.reshape(-1)

    def unpack(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Returns the arrays of a fused buffer as views, in the order of the slots."""
        return [
            buffer[slot.offset : slot.offset + slot.count].reshape(slot.shape)
            for slot in self.slots
        ]


def plan_buckets(
    specs: Sequence[tuple[tuple[int, ...], np.dtype]], bucket_nbytes: int
) -> tuple[Bucket, ...]:
    """Cuts a list of arrays into buckets.

    Arrays keep their order. A bucket takes arrays of one dtype until it holds
    `bucket_nbytes` or more; so an array larger than that is never cut.

    Args:
        specs: shape and dtype of each array.
        bucket_nbytes: the size, in bytes, at which a bucket is closed.

    Returns:
        The buckets, in the order in which they are closed. Together their slots hold every
        index once; offsets are multiples of 64 bytes and do not overlap.
    """
    closed: list[Bucket] = []
    open_slots: dict[np.dtype, list[Slot]] = {}
    for index, (shape, dtype) in enumerate(specs):
        slots = open_slots.setdefault(dtype, [])
        slots.append(Slot(index, tuple(shape), _end(slots, dtype), math.prod(shape)))
        if _end(slots, dtype) * dtype.itemsize >= bucket_nbytes:
            closed.append(_close(open_slots.pop(dtype), dtype))
    closed.extend(_close(slots, dtype) for dtype, slots in open_slots.items())
    return tuple(closed)


def _end(slots: Sequence[Slot], dtype: np.dtype) -> int:
    """Returns the first aligned offset behind the last slot, in elements."""
    if not slots:
        return 0
    step = max(1, ALIGNMENT // math.gcd(ALIGNMENT, dtype.itemsize))
    return -(-(slots[-1].offset + slots[-1].count) // step) * step


def _close(slots: list[Slot], dtype: np.dtype) -> Bucket:
    return Bucket(dtype, tuple(slots), slots[-1].offset + slots[-1].count)
