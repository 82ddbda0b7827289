"""Regions of shared memory: each reduces a bucket at a time. See decisions 12, 47 and 60."""

import os
import weakref
from collections.abc import Sequence

import numpy as np

from keras_dist._engine.buckets import ALIGNMENT, aligned, size_class
from keras_dist._engine.shm.segments import PAGE, CowMapping, Segment

_leases: "weakref.WeakSet[ResultLease]" = weakref.WeakSet()  # whose results a child may keep
RESULTS = [(2**20, 6), (2**23, 4)]  # up to a size in bytes
MAX_POOL_NBYTES = 256 * 2**20  # of shared memory, unless one region is larger


class ResultLease:
    """Lends results in shared memory, used in turn, that scripts read in place.

    A lent result is an array with a base of its own. All views keep the base alive, and so do the
    tensors that a framework makes of them: it lives as long as the result may be read or written.

    The mapping is copy-on-write. TensorFlow writes to a slice of a gradient that nothing else
    reads. The kernel then copies page by page, which is slower than one copy, so after a write
    nothing more is lent.

    A forked child sees the memory of a lent result as well, and this process does not know how long
    it reads it. So results of single calls that are held at a fork count as held for good.
    """

    def __init__(self, views: Sequence[CowMapping], keeps_at_fork: bool = False):
        self._views = views
        self._is_over = False
        self._bases: list[weakref.ref[np.ndarray] | None] = [None] * len(views)
        self._kept: dict[int, np.ndarray] = {}
        if keeps_at_fork:
            _leases.add(self)

    def lend(self, turn: int, count: int, dtype: np.dtype) -> np.ndarray | None:
        """Returns a result in a turn that is not held; `None` once one has been written to."""
        view, nbytes = self._views[turn], count * dtype.itemsize
        self._is_over = self._is_over or view.is_written(nbytes)
        # TensorFlow writes to a slice of a gradient that nothing else reads. The kernel then copies
        # page by page, which is slower than one copy, so after a write nothing more is lent.
        if self._is_over:
            return None
        # All views keep the base alive, and so do the tensors that a framework makes of them.
        base = np.frombuffer(view.memory, np.uint8, nbytes)
        self._bases[turn] = weakref.ref(base)
        return base.view(dtype)

    @property
    def held(self) -> int:
        """The turns whose result is still held, as bits."""
        turns = 0
        for turn, base in enumerate(self._bases):
            if base is not None:
                if base() is None:
                    self._bases[turn] = None
                else:
                    turns |= 1 << turn
        return turns

    def keep_held(self) -> None:
        for turn, reference in enumerate(self._bases):
            base = None if reference is None else reference()
            if base is not None:
                self._kept[turn] = base


def _before_fork() -> None:
    for lease in list(_leases):
        lease.keep_held()


os.register_at_fork(before=_before_fork)


class ResultRows:
    """Chooses rows for results that no rank still reads, the same on all ranks of a node."""

    def __init__(self, count: int, held: np.ndarray, rank: int, lease: ResultLease | None):
        self.count, self._lease = count, lease
        self._held = [line[:1].data for line in held]  # a cache line of each rank, zeros
        self._mine = self._held[rank]
        self._recent = list(range(count))  # the row that was used last is the first
        self.next = 0  # the row that the next call writes; no rank holds or reads it
        # Whether it is that of this call, which must not be lent: the ranks meet before the next.
        self.is_crowded = False

    def announce(self) -> None:
        """Tells the other ranks which rows this rank holds, before the rendezvous."""
        self._mine[0] = 0 if self._lease is None else self._lease.held

    def advance(self) -> int:
        """Chooses the next row, returns this one; the ranks must meet before one announces."""
        return self.follow(self.choose())

    def choose(self) -> int:
        """Returns the row of the next call, that of this one if all others are held."""
        held = 0
        for word in self._held:
            held |= word[0]
        row = self.next
        # The free row that was used last is most likely to be in a cache. The row of this call may
        # still be read by others: if it is chosen, nobody is lent this result, and the ranks meet
        # once more when they have copied it.
        return next((r for r in self._recent if r != row and not held >> r & 1), row)

    def follow(self, chosen: int) -> int:
        """Ends a call: the next one writes the row that was chosen; returns the row of this one."""
        row, self.next = self.next, chosen
        self.is_crowded = chosen == row
        self._recent.remove(row)
        self._recent.insert(0, row)
        return row

    def lend(self, count: int, dtype: np.dtype) -> np.ndarray | None:
        """Returns the result of the last call to read in place, or `None`: copy it."""
        if self._lease is None or self.is_crowded:
            return None
        return self._lease.lend(self._recent[0], count, dtype)


class Region:
    """Memory of a bucket at a time, in rows of equal size."""

    def __init__(
        self, segment: Segment, offset: int, capacity: int, nbytes: int, keeps_at_fork: bool = True
    ):
        self._segment, self._offset, self._keeps_at_fork = segment, offset, keeps_at_fork
        self.capacity = capacity  # of a row, in bytes
        self.nbytes = nbytes  # the same on all ranks
        self.turn = 0  # of the last call, the same on all ranks, where there are no results
        self.results: ResultRows | None = None

    def row(self, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        return self._segment.array(self._offset + number * self.capacity, count, dtype)

    def make_results(self, count: int, rank: int, size: int) -> ResultRows:
        """Makes the first rows those of results, lent if this process maps them copy-on-write."""
        nbytes = held_nbytes(size)
        words = self._segment.array(self._offset, nbytes // 8, np.dtype(np.uint64))
        self._offset += nbytes
        starts = [self._offset + row * self.capacity for row in range(count)]
        views = [self._segment.private_view(start, self.capacity) for start in starts]
        known = [view for view in views if view is not None]
        lease = ResultLease(known, self._keeps_at_fork) if known else None
        self.results = ResultRows(count, words.reshape(-1, ALIGNMENT // 8)[:size], rank, lease)
        return self.results


def held_nbytes(size: int) -> int:
    """Returns the size in bytes of the words in which ranks say which results they hold."""
    return aligned(size * ALIGNMENT, PAGE)


def result_count(capacity: int) -> int:
    """Returns how many results of a size a region of single calls has: of large ones, few."""
    return next((count for limit, count in RESULTS if capacity <= limit), 3)


class RegionPool:
    """The regions of the single calls of a communicator; equal on all ranks."""

    def __init__(self) -> None:
        self.version = 0  # changes with the regions, which may change that of a call
        self._regions: dict[tuple[bool, int], Region] = {}
        self.refused = float("inf")  # the least size in bytes for which there was no memory

    def find(self, nbytes: int, is_small: bool, new_nbytes: int) -> Region | None:
        """Returns a region for a bucket, of any size if a new one has no room; `None`: make one."""
        fitting = [
            region
            for (small, capacity), region in list(self._regions.items())
            if small == is_small and capacity >= nbytes
        ]
        smallest = min(fitting, key=lambda region: region.capacity, default=None)
        if smallest is None or smallest.capacity <= 2 * aligned(size_class(nbytes), PAGE):
            return smallest
        return None if self.nbytes + new_nbytes <= MAX_POOL_NBYTES else smallest

    def make_room(self, nbytes: int) -> None:
        """Drops all regions if a new one of this size does not fit beside them."""
        if self.nbytes + nbytes > MAX_POOL_NBYTES:
            self.clear()

    def add(self, region: Region, is_small: bool) -> None:
        self.version += 1
        self._regions[is_small, region.capacity] = region

    def clear(self) -> None:
        self.version += 1
        self._regions.clear()

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in list(self._regions.values()))
