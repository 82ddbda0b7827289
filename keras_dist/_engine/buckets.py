"""The bucket plan: which arrays share a bucket, and their offsets in its buffer. Pure.

A plan depends only on shapes, dtypes and the bucket size, so ranks with the same arrays make the
same plan without a message.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

# Bytes: a cache line, and the alignment at which TensorFlow and JAX take memory without a copy.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Slot:
    """An array in a fused buffer."""

    index: int
    shape: tuple[int, ...]
    offset: int
    count: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Arrays of one dtype that are reduced together."""

    dtype: np.dtype
    slots: tuple[Slot, ...]
    count: int

    @property
    def nbytes(self) -> int:
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

    def clear_gaps(self, buffer: np.ndarray) -> np.ndarray:
        """Sets what no array uses to zero, as it is reduced as well; returns the buffer."""
        for part in self._gaps:
            buffer[part] = 0
        return buffer

    @functools.cached_property
    def _gaps(self) -> list[slice]:
        pairs = itertools.pairwise(self._parts)
        return [slice(a.stop, b.start) for a, b in pairs if a.stop < b.start]

    @functools.cached_property
    def _parts(self) -> list[slice]:
        return [slice(slot.offset, slot.offset + slot.count) for slot in self.slots]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...] | None]:
        return [None if len(slot.shape) == 1 else slot.shape for slot in self.slots]


class BucketRange:
    """A range of a fused buffer, as parts of its arrays."""

    def __init__(self, bucket: Bucket, low: int, high: int):
        self.low = low
        self.high = high
        #: for each array: index of its slot, start of its part in the array and in the piece, count
        self.parts: list[tuple[int, int, int, int]] = []
        for number, slot in enumerate(bucket.slots):
            begin, end = max(slot.offset, low), min(slot.offset + slot.count, high)
            if begin < end:
                self.parts.append((number, begin - slot.offset, begin - low, end - begin))
        #: for each array: index of its slot, and the part; no part where that is the whole array
        self.slices: list[tuple[int, slice | None]] = [
            (number, None if count == bucket.slots[number].count else slice(begin, begin + count))
            for number, begin, _, count in self.parts
        ]
        self._is_single = bool(self.parts) and self.parts[0][3] == len(self)
        self._fillers = self._find_fillers(bucket.dtype)

    def __len__(self) -> int:
        return self.high - self.low

    def of(self, arrays: Sequence[np.ndarray], scratch: np.ndarray) -> np.ndarray:
        """Returns the piece of flat arrays: a view if it lies in one, else a copy in `scratch`."""
        if self._is_single:
            [(slot, part)] = self.slices
            return arrays[slot] if part is None else arrays[slot][part]
        packed = scratch[: len(self)]
        self.pack_into(packed, arrays)
        return packed

    def pack_into(self, target: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Copies the piece of flat arrays; what belongs to no array becomes zero."""
        if self._is_single:
            target[...] = self.of(arrays, target)
            return
        parts = [arrays[slot] if part is None else arrays[slot][part] for slot, part in self.slices]
        for index, zeros in self._fillers:
            parts.insert(index, zeros)
        if parts:
            np.concatenate(parts, out=target)

    def _find_fillers(self, dtype: np.dtype) -> list[tuple[int, np.ndarray]]:
        """Returns zeros for the gaps between the arrays, each with its index among the parts."""
        found: list[tuple[int, np.ndarray]] = []
        end = 0
        for number, (_, _, at, count) in enumerate(self.parts):
            if at > end:
                found.append((number + len(found), np.zeros(at - end, dtype)))
            end = at + count
        if end < len(self):
            found.append((len(self.parts) + len(found), np.zeros(len(self) - end, dtype)))
        return found


def aligned_array(
    count: int, dtype: np.dtype, make: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns a new flat array that starts on a cache line: TensorFlow and JAX copy others."""
    nbytes = count * dtype.itemsize
    memory = make(nbytes + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + nbytes].view(dtype)


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Returns the next multiple of a cache line, or of another number of bytes."""
    return -(-nbytes // to) * to


def size_class(nbytes: int) -> int:
    """Returns the size of memory for a number of bytes: in steps of an eighth, or of 4 KiB."""
    return aligned(max(1, nbytes), 1 << max(12, nbytes.bit_length() - 4))


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
    alone: bool = False,
    tables: Sequence[int] = (),
) -> tuple[Bucket, ...]:
    """Distributes arrays, in their order, over buckets of one dtype; no array is cut.

    A bucket is closed at `bucket_nbytes`, the first one at `first_nbytes`. If `alone`, an array of
    `bucket_nbytes` or more has a bucket of its own, and so has each of `tables`. Offsets are
    multiples of 64 bytes.
    """
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    closed: list[Bucket] = []
    open_slots: dict[tuple[int | None, np.dtype], list[Slot]] = {}
    for index, (shape, dtype) in enumerate(specs):
        key = group_of.get(index), dtype
        count = math.prod(shape)
        # A large array is sent from where it lies, while several are copied together first.
        is_large = alone and index not in group_of and count * dtype.itemsize >= bucket_nbytes
        if is_large or index in tables:
            closed.append(_close([Slot(index, tuple(shape), 0, count)], dtype))
            continue
        slots = open_slots.setdefault(key, [])
        slots.append(Slot(index, tuple(shape), _end(slots, dtype), count))
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
