"""Copies of contributions into shared memory, for the ranks that reduce them."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_dist._engine.buckets import Bucket, BucketRange
from keras_dist._engine.shm.node import Node


class CopyIn:
    """Each rank copies the slices that others reduce into shared memory.

    The first other contribution to a slice is written to the memory of its result and reduced in
    place, the rest to extra rows. For two ranks that is half a copy each, and no rows.

    All slices are copied before any is reduced. Copied and reduced in blocks that stay in cache,
    they would cross the memory bus less often, but a core would fetch lines that another core has
    just written, which took up to twice the time in a training step.
    """

    def __init__(self, node: Node, bucket: Bucket, bounds: Sequence[int], scratch: np.ndarray):
        self._rank, self._size, self._scratch = node.rank, node.size, scratch
        self._low = bounds[node.rank]
        slices = enumerate(itertools.pairwise(bounds))
        self._others = [
            (owner, BucketRange(bucket, *ends)) for owner, ends in slices if owner != node.rank
        ]
        self._arrays: Sequence[np.ndarray] = ()

    def bind(
        self,
        results: Sequence[np.ndarray],
        rows: Sequence[np.ndarray],
        chunks: Sequence[BucketRange],
    ) -> None:
        """Uses shared memory."""

        def target(owner: int, rank: int, turn: int) -> np.ndarray:
            """Returns the memory to which `rank` copies the slice that `owner` reduces."""
            others_before = rank - (rank > owner)
            return results[turn] if others_before == 0 else rows[others_before - 1]

        def others(chunk: BucketRange, turn: int, ranks: Iterable[int]) -> list[np.ndarray]:
            part = slice(chunk.low, chunk.low + len(chunk))
            return [target(self._rank, rank, turn)[part] for rank in ranks]

        before, after = range(self._rank), range(self._rank + 1, self._size)
        # By turn: the slices of other ranks, each with its target; the chunks of this rank, each
        # with the contributions of lower and of higher ranks.
        self._copies, self._chunks = [], []
        for turn, result in enumerate(results):
            copies = [
                (target(owner, self._rank, turn)[piece.low : piece.low + len(piece)], piece)
                for owner, piece in self._others
            ]
            parts = [
                (
                    result[chunk.low : chunk.low + len(chunk)],
                    others(chunk, turn, before),
                    chunk,
                    others(chunk, turn, after),
                )
                for chunk in chunks
            ]
            self._copies.append(copies)
            self._chunks.append(parts)

    def publish(self, arrays: Sequence[np.ndarray], turn: int) -> None:
        """Makes the arrays of this rank visible to the others, before the rendezvous."""
        self._arrays = [array if array.ndim == 1 else array.reshape(-1) for array in arrays]
        for target, piece in self._copies[turn]:
            piece.pack_into(target, self._arrays)

    def pieces(
        self, turn: int, out: np.ndarray | None = None, sums: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yields the chunks of this rank: the result, and all contributions in rank order.

        The first or second contribution is the memory of the result, which is written after both
        are read. With `sums` the contributions stay as they are.
        """
        arrays, scratch = self._arrays, self._scratch
        for result, before, chunk, after in self._chunks[turn]:
            target = result
            if sums is not None:
                start = chunk.low - self._low
                target = sums[start : start + len(chunk)]
            yield target, [*before, chunk.of(arrays, scratch), *after]
            if out is not None:
                out[chunk.low : chunk.low + len(chunk)] = target

    def forget(self) -> None:
        """Releases the arrays of this rank, after it has reduced."""
        self._arrays = ()
