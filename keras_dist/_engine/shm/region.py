"""Regions of shared memory: each reduces one bucket at a time, in turn.

The plan of gradients has a region for each bucket. Single calls share regions by size: a call takes
one that is large enough, so calls of many shapes need no more memory than calls of one. All ranks
make and drop the same regions at the same call.
"""

import numpy as np

from keras_dist._engine.buckets import ALIGNMENT, aligned, size_class
from keras_dist._engine.shm.cow_mapping import PAGE
from keras_dist._engine.shm.result_rows import ResultRows
from keras_dist._engine.shm.segments import Segment
from keras_dist._engine.shm.zero_copy import ResultLease

RESULTS = [(2**20, 6), (2**23, 4)]  # up to a size in bytes
MAX_POOL_NBYTES = 256 * 2**20  # of shared memory, unless one region is larger


class Region:
    """Memory of a bucket at a time, in rows of equal size.

    Args:
        offset: where the region starts, in bytes.
        capacity: size of a row in bytes: the largest bucket that fits.
        nbytes: size of the region, the same on all ranks.

    Attributes:
        turn: the turn of the last call, the same on all ranks, where there are no results.
        results: the rows of results; `None` where each rank reduces the whole bucket.
    """

    def __init__(
        self, segment: Segment, offset: int, capacity: int, nbytes: int, keeps_at_fork: bool = True
    ):
        self._segment, self._offset, self._keeps_at_fork = segment, offset, keeps_at_fork
        self.capacity, self.nbytes = capacity, nbytes
        self.turn = 0
        self.results: ResultRows | None = None

    def row(self, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns the first `count` elements of a row."""
        return self._segment.array(self._offset + number * self.capacity, count, dtype)

    def make_results(self, count: int, rank: int, size: int) -> ResultRows:
        """Makes the first rows those of results, behind a word for each rank.

        Results are lent if this process sees them in a copy-on-write mapping.
        """
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
    """Returns the number of results of a size in bytes in a region of single calls.

    A script may hold some while it calls for more. Large ones are few, since memory is.
    """
    return next((count for limit, count in RESULTS if capacity <= limit), 3)


class RegionPool:
    """The regions of the single calls of a communicator; equal on all ranks.

    Attributes:
        version: changes when a region is added or dropped, which may change the region of a call.
    """

    def __init__(self) -> None:
        self.version = 0
        self._regions: dict[tuple[bool, int], Region] = {}
        self._refused = float("inf")

    def find(self, nbytes: int, is_small: bool, new_nbytes: int) -> Region | None:
        """Returns the region for a bucket; `None` if one should be made.

        Args:
            nbytes: size of the bucket.
            new_nbytes: size of a new region. If there is no room for it, a region of any size that
                fits is used.
        """
        fitting = [
            region
            for (small, capacity), region in list(self._regions.items())
            if small == is_small and capacity >= nbytes
        ]
        smallest = min(fitting, key=lambda region: region.capacity, default=None)
        if smallest is None or smallest.capacity <= 2 * aligned(size_class(nbytes), PAGE):
            return smallest
        return None if self.nbytes + new_nbytes <= MAX_POOL_NBYTES else smallest

    def refuse(self, nbytes: int) -> None:
        """Records that there is no memory for a region of this size."""
        self._refused = min(self._refused, nbytes)

    def is_too_large(self, nbytes: int) -> bool:
        """Returns whether there was no memory for a region of this size."""
        return nbytes >= self._refused

    def make_room(self, nbytes: int) -> None:
        """Drops all regions if a new one of this size does not fit beside them."""
        if self.nbytes + nbytes > MAX_POOL_NBYTES:
            self.clear()

    def add(self, region: Region, is_small: bool) -> None:
        """Adds a region."""
        self.version += 1
        self._regions[is_small, region.capacity] = region

    def clear(self) -> None:
        """Drops all regions."""
        self.version += 1
        self._regions.clear()

    @property
    def nbytes(self) -> int:
        """Size of all regions in bytes."""
        return sum(region.nbytes for region in list(self._regions.values()))
