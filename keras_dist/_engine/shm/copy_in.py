"""Copies of contributions into shared memory, for the ranks that reduce them."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from keras_dist._engine.buckets import Bucket, Piece, aligned
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.segments import Segment

__all__ = ["CopyIn"]


class CopyIn:
    """Each rank copies the slices that others reduce into shared memory.

    The first other contribution to a slice is written to the memory of its result and reduced in
    place, the rest to extra rows. For two ranks that is half a copy each, and no rows.

    All slices are copied before any is reduced. Copied and reduced in blocks that stay in cache,
    they would cross the memory bus less often, but a core would fetch lines that another core has
    just written, which took up to twice the time in a training step.

    Args:
        node: the ranks.
        bucket: the bucket.
        bounds: first element of the slice of each rank, and the end.
        scratch: a buffer of the size of the largest chunk.
    """

    def __init__(self, node: Node, bucket: Bucket, bounds: Sequence[int], scratch: np.ndarray):
        self._rank, self._size = node.rank, node.size
        self._bucket, self._bounds, self._scratch = bucket, bounds, scratch
        self._stride = aligned(bucket.nbytes)
        self._arrays: Sequence[np.ndarray] = ()
        self.nbytes = max(0, node.size - 2) * self._stride

    def bind_memory(self, segment: Segment, offset: int, results: Sequence[np.ndarray]) -> None:
        """Uses a part of a segment, `offset` bytes from its start."""
        self._results = results
        self._rows = [
            segment.array(offset + row * self._stride, self._bucket.count, self._bucket.dtype)
            for row in range(self._size - 2)
        ]
        # By turn: the target, the index of the array and its part.
        self._copies = [list(self._plan_copies(turn)) for turn in range(len(results))]
        self._found: dict[tuple[int, int], list[np.ndarray]] = {}

    def publish(self, arrays: Sequence[np.ndarray], turn: int) -> None:
        """Makes the arrays of this rank visible to the others, before the rendezvous."""
        self._arrays = [array if array.ndim == 1 else array.reshape(-1) for array in arrays]
        for target, slot, part in self._copies[turn]:
            target[...] = self._arrays[slot][part]

    def parts(self, chunk: Piece, turn: int) -> list[np.ndarray]:
        """Returns a chunk of all contributions, in rank order.

        The first or second is the memory of the result, which is written after both are read.
        """
        others = self._found.get((turn, chunk.low))
        if others is None:
            others = self._found[turn, chunk.low] = [
                self._target(self._rank, rank, turn)[chunk.low : chunk.high]
                for rank in range(self._size)
                if rank != self._rank
            ]
        mine = chunk.of(self._arrays, self._scratch)
        return [*others[: self._rank], mine, *others[self._rank :]]

    def forget(self) -> None:
        """Releases the arrays of this rank, after it has reduced."""
        self._arrays = ()

    def _target(self, owner: int, rank: int, turn: int) -> np.ndarray:
        """Returns the memory to which `rank` copies the slice that `owner` reduces."""
        others_before = rank - (rank > owner)
        return self._results[turn] if others_before == 0 else self._rows[others_before - 1]

    def _plan_copies(self, turn: int) -> Iterator[tuple[np.ndarray, int, slice]]:
        for owner, (low, high) in enumerate(itertools.pairwise(self._bounds)):
            if owner != self._rank:
                target = self._target(owner, self._rank, turn)
                for slot, begin, at, count in Piece(self._bucket, low, high).parts:
                    yield target[low + at : low + at + count], slot, slice(begin, begin + count)
