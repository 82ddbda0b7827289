"""Reduction of a bucket by the ranks of a node, in shared memory. Independent of MPI.

Every rank copies a small bucket into shared memory and reduces it whole: one rendezvous. Of a large
bucket each rank reduces a slice, in rank order, into a result that all ranks see and read in place;
`copy_in` moves the contributions there.

Why the result can be read in place. There are three results, used in turn. A rank writes to the
result of call t again only in call t + 3, which it enters only after all ranks have met in call
t + 2, and a rank comes to that rendezvous only after the code after its call t and its call t + 1
has run. So the result of call t does not change until the second following call of this rank; the
same holds for calls on other buckets in between. A rank that comes to call t + 2 while the result
of call t is still held says so at that rendezvous, see `zero_copy`; then no rank writes to this
memory any more. A result that is read in place starts on a page.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, reduce_each, reduce_into
from keras_dist._engine.buckets import (
    Bucket,
    Piece,
    aligned,
    aligned_array,
    slice_bounds,
)
from keras_dist._engine.shm.copy_in import CopyIn
from keras_dist._engine.shm.cow_mapping import PAGE
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.segments import Segment
from keras_dist._engine.shm.zero_copy import ResultLease
from keras_dist._engine.tracing import spans

__all__ = ["RESULTS", "BucketReduction", "Finish", "Full", "SliceError", "bucket_reduction"]

SMALL_NBYTES = 128 * 1024  # up to here every rank reduces everything: one rendezvous, not two
CHUNK_NBYTES = 512 * 1024  # reduced at once, while the cache of a core holds it
WHOLE_NBYTES = 32 * 1024  # a part of an array of this size or more is a chunk of its own
RESULTS = 3
DONE = b"slices are ready"  # 16 bytes, as a digest
FAILED = b"a slice is not.."

# Reduces this rank's slice over the nodes, in place, before the other ranks of the node see it.
# Takes the slice and whether it is ready; returns whether it is ready on all nodes.
Finish = Callable[[np.ndarray, bool], bool]


class SliceError(Exception):
    """A rank could not reduce its slice. Raised on every rank of all nodes."""


class BucketReduction(Protocol):
    """The shared memory of one bucket, and its reduction.

    A call is `publish`, a rendezvous and `reduce`, see `FusedAllreduce`.
    """

    nbytes: int  # of shared memory, for all ranks together
    is_shared: bool  # whether the result lies in shared memory

    def bind_memory(self, segment: Segment, offset: int) -> None:
        """Uses a part of a segment, `offset` bytes from its start."""

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        """Makes the arrays of this rank visible to the others, before the rendezvous."""

    @property
    def is_held(self) -> bool:
        """Whether a result is held that ranks may write to after the rendezvous."""

    def lend(self) -> np.ndarray | None:
        """Returns the fused result of the last call to read in place, or `None`: copy it."""

    def reduce(self, finish: Finish | None = None) -> np.ndarray:
        """Reduces, after the rendezvous. Collective: every rank of the node.

        Args:
            finish: reduces a slice over the nodes. Defaults to `None`: there is one node.

        Returns:
            The fused result; if `is_shared`, copy or lend it.

        Raises:
            SliceError: a rank could not reduce its slice; raised on every rank of all nodes.
        """


def bucket_reduction(
    node: Node, bucket: Bucket, op: ReduceOp, slices: int | None = None
) -> BucketReduction:
    """Returns the reduction that fits the size of a bucket.

    Args:
        node: the ranks of this node.
        bucket: the bucket.
        op: the reduction.
        slices: number of ranks that reduce a slice of a large bucket. Defaults to all.
    """
    if bucket.nbytes <= SMALL_NBYTES:
        return Full(node, bucket, op)
    return _Sliced(node, bucket, op, slices or node.size)


class Full:
    """Every rank reduces everything; two sets of rows, used in turn, save a rendezvous."""

    is_shared = False
    is_held = False

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp):
        self._node, self._bucket, self._op = node, bucket, op
        self._stride = aligned(bucket.nbytes)
        self._turn = 0
        self.nbytes = aligned(2 * node.size * self._stride, PAGE)

    def bind_memory(self, segment: Segment, offset: int) -> None:
        size, stride = self._node.size, self._stride
        rows = [
            segment.array(offset + row * stride, self._bucket.count, self._bucket.dtype)
            for row in range(2 * size)
        ]
        self._rows = (rows[:size], rows[size:])

    def lend(self) -> np.ndarray | None:
        return None

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        self._bucket.pack_into(self._rows[self._turn ^ 1][self._node.rank], arrays)

    def reduce(self, finish: Finish | None = None) -> np.ndarray:
        with spans.phase("reduce"):
            result = aligned_array(self._bucket.count, self._bucket.dtype)
            self.reduce_published(result)
        self.next_turn()
        return result

    def reduce_published(self, result: np.ndarray) -> None:
        """Reduces what the ranks have published into an array; the same again until `next_turn`."""
        reduce_into(result, iter(self._rows[self._turn ^ 1]), self._op)

    def next_turn(self) -> None:
        """Ends the call, after the rendezvous: the turns of the ranks stay equal."""
        self._turn ^= 1


class _Sliced:
    """Each rank reduces a slice, chunk by chunk, into a result that all ranks see."""

    is_shared = True

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp, slices: int):
        self._node, self._bucket, self._op = node, bucket, op
        bounds = slice_bounds(bucket.count, slices, bucket.dtype.itemsize)
        bounds += [bucket.count] * (node.size - slices)
        self._mine = slice(*bounds[node.rank : node.rank + 2])
        self._chunks = _chunks(bucket, self._mine)
        self._stride = aligned(bucket.nbytes, PAGE)
        self._turn = 0
        scratch = node.scratch(CHUNK_NBYTES).view(bucket.dtype)
        self._copies = CopyIn(node, bucket, bounds, scratch)
        self.nbytes = RESULTS * self._stride + aligned(self._copies.nbytes, PAGE)

    def bind_memory(self, segment: Segment, offset: int) -> None:
        self._results = [
            segment.array(offset + turn * self._stride, self._bucket.count, self._bucket.dtype)
            for turn in range(RESULTS)
        ]
        offsets = [offset + turn * self._stride for turn in range(RESULTS)]
        views = [segment.private_view(start, self._bucket.nbytes) for start in offsets]
        known = [view for view in views if view is not None]
        self._lease = ResultLease(known, self._bucket.dtype) if known else None
        # By turn: each chunk and its memory in the result.
        self._targets = [
            [(result[chunk.low : chunk.high], chunk) for chunk in self._chunks]
            for result in self._results
        ]
        self._copies.bind_memory(segment, offset + RESULTS * self._stride, self._results)

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        self._copies.publish(arrays, self._next_turn())

    @property
    def is_held(self) -> bool:
        lease = self._lease
        return lease is not None and lease.is_held((self._next_turn() + 1) % RESULTS)

    def lend(self) -> np.ndarray | None:
        return None if self._lease is None else self._lease.lend(self._turn)

    def reduce(self, finish: Finish | None = None) -> np.ndarray:
        # After the rendezvous: the turns of the ranks stay equal.
        self._turn = self._next_turn()
        result = self._results[self._turn]
        failure = None
        try:
            with spans.phase("reduce"):
                pieces = (
                    (target, self._copies.parts(chunk, self._turn))
                    for target, chunk in self._targets[self._turn]
                )
                reduce_each(pieces, self._bucket.dtype, self._op)
        except Exception as error:  # ranks of all nodes wait for this slice
            failure = error
        ready = failure is None
        if finish is not None:
            ready = finish(result[self._mine], ready)
        with spans.phase("wait for slices"):
            same = self._node.meet(DONE if ready else FAILED)
        self._copies.forget()
        if not (ready and same):
            what = "an error on another rank" if failure is None else repr(failure)
            raise SliceError(what) from failure
        return result

    def _next_turn(self) -> int:
        return (self._turn + 1) % RESULTS


def _chunks(bucket: Bucket, part: slice) -> list[Piece]:
    """Cuts a slice of a bucket into chunks that the cache of a core holds.

    Elements of a large array are a chunk of their own, which is read in place; small arrays share
    a chunk.
    """
    step, whole = CHUNK_NBYTES // bucket.dtype.itemsize, WHOLE_NBYTES // bucket.dtype.itemsize
    cuts = {part.start, part.stop}
    for slot in bucket.slots:
        low, high = max(slot.offset, part.start), min(slot.offset + slot.count, part.stop)
        if high - low >= whole:
            cuts.update((low, high))
    return [
        Piece(bucket, low, min(low + step, end))
        for begin, end in itertools.pairwise(sorted(cuts))
        for low in range(begin, end, step)
    ]
