"""The bucket plan: which arrays share a bucket, and their offsets in its buffer. Pure.

A plan depends only on shapes, dtypes and the bucket size, so ranks with the same arrays make the
same plan without a message.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

__all__ = [
    "ALIGNMENT",
    "Bucket",
    "Piece",
    "Slot",
    "aligned",
    "aligned_array",
    "plan_buckets",
    "slice_bounds",
]

# Bytes: a cache line, and the alignment at which TensorFlow and JAX take memory without a copy.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Slot:
    """An array in a fused buffer.

    Args:
        index: index of the array in the list that was planned.
        shape: its shape.
        offset: its first element in the buffer.
        count: number of its elements.
    """

    index: int
    shape: tuple[int, ...]
    offset: int
    count: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Arrays of one dtype that are reduced together.

    Args:
        dtype: their dtype.
        slots: their slots, in the order of the list.
        count: number of elements of the fused buffer, with gaps for alignment.
    """

    dtype: np.dtype
    slots: tuple[Slot, ...]
    count: int

    @property
    def nbytes(self) -> int:
        """Size of the fused buffer in bytes."""
        return self.count * self.dtype.itemsize

    def pack(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Copies arrays, one for each slot in their order, into a new fused buffer."""
        buffer = aligned_array(self.count, self.dtype, np.zeros)
        self.pack_into(buffer, arrays)
        return buffer

    def pack_into(self, buffer: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Copies arrays, one for each slot in their order, into a fused buffer."""
        for part, array in zip(self._parts, arrays, strict=True):
            buffer[part] = array.reshape(-1)

    def unpack(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Returns the arrays of a fused buffer as views, in the order of the slots."""
        # A reshape without effect takes longer than the slice.
        return [
            buffer[part] if shape is None else buffer[part].reshape(shape)
            for part, shape in zip(self._parts, self._shapes, strict=True)
        ]

    @functools.cached_property
    def _parts(self) -> list[slice]:
        return [slice(slot.offset, slot.offset + slot.count) for slot in self.slots]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...] | None]:
        return [None if len(slot.shape) == 1 else slot.shape for slot in self.slots]


class Piece:
    """A range of a fused buffer, as parts of its arrays.

    Args:
        bucket: the bucket.
        low: the first element.
        high: the end, exclusive.
    """

    def __init__(self, bucket: Bucket, low: int, high: int):
        self.low = low
        self.high = high
        #: for each array: index of its slot, start of its part in the array and in the piece, count
        self.parts: list[tuple[int, int, int, int]] = []
        for number, slot in enumerate(bucket.slots):
            begin, end = max(slot.offset, low), min(slot.offset + slot.count, high)
            if begin < end:
                self.parts.append((number, begin - slot.offset, begin - low, end - begin))
        #: if the piece lies in one array: index of its slot, and the part
        self.single: tuple[int, slice] | None = None
        if self.parts and self.parts[0][3] == len(self):
            slot_number, begin, _, count = self.parts[0]
            self.single = slot_number, slice(begin, begin + count)

    def __len__(self) -> int:
        return self.high - self.low

    def of(self, arrays: Sequence[np.ndarray], scratch: np.ndarray) -> np.ndarray:
        """Returns the piece of flat arrays: a view if it lies in one, else a copy in `scratch`."""
        if self.single is not None:
            number, part = self.single
            return arrays[number][part]
        for slot, begin, at, count in self.parts:
            scratch[at : at + count] = arrays[slot][begin : begin + count]
        return scratch[: len(self)]


def aligned_array(
    count: int, dtype: np.dtype, make: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns a new flat array that starts on a cache line.

    TensorFlow and JAX copy other arrays.

    Args:
        count: number of elements.
        dtype: their dtype.
        make: function of numpy that allocates it. Defaults to `np.empty`.
    """
    nbytes = count * dtype.itemsize
    memory = make(nbytes + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + nbytes].view(dtype)


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Returns the next multiple of a cache line, or of another number of bytes."""
    return -(-nbytes // to) * to


def slice_bounds(count: int, size: int, itemsize: int) -> list[int]:
    """Returns the first element of the slice of each rank, on a cache line, and the end."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return [min(count, lines * rank // size * step) for rank in range(size + 1)]


def plan_buckets(
    specs: Sequence[tuple[tuple[int, ...], np.dtype]],
    bucket_nbytes: int,
    first_nbytes: int | None = None,
    groups: Sequence[Sequence[int]] = (),
) -> tuple[Bucket, ...]:
    """Distributes a list of arrays over buckets.

    Arrays keep their order. A bucket takes arrays of one dtype until it holds `bucket_nbytes` or
    more; no array is cut.

    Args:
        specs: shape and dtype of each array.
        bucket_nbytes: size in bytes at which a bucket is closed.
        first_nbytes: the same for the first bucket, if it is smaller.
        groups: for each group the indices of its arrays. They share a bucket for each dtype,
            whatever their size, with no other array. Defaults to none.

    Returns:
        The buckets, in the order in which they are closed. Their slots have every index once;
        offsets are multiples of 64 bytes and slots do not overlap.
    """
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    closed: list[Bucket] = []
    open_slots: dict[tuple[int | None, np.dtype], list[Slot]] = {}
    for index, (shape, dtype) in enumerate(specs):
        key = group_of.get(index), dtype
        slots = open_slots.setdefault(key, [])
        slots.append(Slot(index, tuple(shape), _end(slots, dtype), math.prod(shape)))
        limit = bucket_nbytes if closed else min(bucket_nbytes, first_nbytes or bucket_nbytes)
        if index not in group_of and _end(slots, dtype) * dtype.itemsize >= limit:
            closed.append(_close(open_slots.pop(key), dtype))
    closed.extend(_close(slots, dtype) for (_, dtype), slots in open_slots.items())
    return tuple(closed)


def _end(slots: Sequence[Slot], dtype: np.dtype) -> int:
    """Returns the first aligned offset after the last slot, in elements."""
    if not slots:
        return 0
    step = ALIGNMENT // math.gcd(ALIGNMENT, dtype.itemsize)
    return -(-(slots[-1].offset + slots[-1].count) // step) * step


def _close(slots: list[Slot], dtype: np.dtype) -> Bucket:
    return Bucket(dtype, tuple(slots), slots[-1].offset + slots[-1].count)
