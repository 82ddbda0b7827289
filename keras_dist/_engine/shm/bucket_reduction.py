"""A bucket reduced by the ranks of a node, in memory that they share. Knows no MPI.

A small bucket is copied into shared memory by every rank and reduced whole by every rank: one
meeting. Of a larger one each rank reduces a slice, in rank order, and writes it to a result
that all ranks see and read in place; `ways` has the ways in which contributions come there.

Why the result can be read in place. There are three results, used in turn. A rank writes to
the result of call t again only in call t + 3, which it enters only after all ranks have met in
call t + 2, and a rank comes to that meeting only after the code behind its call t and its
call t + 1 has run. So the result of call t stays as it is until this rank itself calls for
the second time from there; the same holds for calls on other buckets in between. A rank that
comes to call t + 2 while somebody still holds the result of call t says so at that meeting, see
`lending`; then all ranks leave this memory as it is. What is read in place begins on a page.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, reduce_each, reduce_into
from keras_dist._engine.collectives.buckets import (
    Bucket,
    Piece,
    aligned,
    aligned_array,
    slice_bounds,
)
from keras_dist._engine.shm.cow_mapping import PAGE
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.segments import Segment
from keras_dist._engine.shm.transports import CopyIn, RemoteRead
from keras_dist._engine.shm.zero_copy import ResultLease
from keras_dist._engine.tracing import spans

__all__ = ["BucketReduction", "Finish", "SliceError", "bucket_reduction"]

SMALL_NBYTES = 128 * 1024  # up to here every rank reduces everything: one meeting, not two
READ_NBYTES = 4 * 2**20  # from here on a bucket may be read where it lies
CHUNK_NBYTES = 512 * 1024  # reduced in one go, while a core's cache holds it
WHOLE_NBYTES = 32 * 1024  # a part of an array of this size or more is a chunk of its own
RESULTS = 3
DONE = b"slices are ready"  # 16 bytes, as a digest
FAILED = b"a slice is not.."

# What is left to do over the nodes, in place, with this rank's slice before the others of the
# node see it; told whether the slice is there, it says whether it is so on all nodes.
Finish = Callable[[np.ndarray, bool], bool]


class SliceError(Exception):
    """A rank could not reduce its slice. Raised on every rank of all nodes."""


class BucketReduction(Protocol):
    """One bucket's shared memory and the arithmetic in it.

    A call is `publish`, a meeting and `reduce`; `FusedAllreduce` puts them together.
    """

    nbytes: int  # of shared memory, for all ranks together
    is_shared: bool  # whether the result lies in memory that all ranks share

    def settle(self, segment: Segment, offset: int) -> None:
        """Takes its place in a segment, `offset` bytes from its start."""

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        """Makes this rank's arrays visible to the others, before the ranks meet."""

    @property
    def is_held(self) -> bool:
        """Whether a result is held that ranks may write to once they have met."""

    def lend(self) -> np.ndarray | None:
        """Returns the fused result of the last call, to be read in place; `None`: copy it."""

    def reduce(self, finish: Finish | None = None) -> np.ndarray:
        """Reduces, after the ranks have met. Collective: every rank of the node.

        Args:
            finish: what is left to do over the nodes. Defaults to nothing.

        Returns:
            The fused result; when `is_shared`, it is to be copied or lent.

        Raises:
            SliceError: a rank could not reduce its slice; raised on every rank of all nodes.
        """


def bucket_reduction(node: Node, bucket: Bucket, op: ReduceOp) -> BucketReduction:
    """Returns the reduction that fits the size of a bucket."""
    if bucket.nbytes <= SMALL_NBYTES:
        return _Whole(node, bucket, op)
    return _Sliced(node, bucket, op)


class _Whole:
    """Every rank reduces everything; two sets of rows, used in turn, as one meeting is saved."""

    is_shared = False
    is_held = False

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp):
        self._node, self._bucket, self._op = node, bucket, op
        self._stride = aligned(bucket.nbytes)
        self._turn = 0
        self.nbytes = aligned(2 * node.size * self._stride, PAGE)

    def settle(self, segment: Segment, offset: int) -> None:
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
        # Only now, when all have come for the same call: the turns of the ranks stay equal.
        self._turn ^= 1
        with spans.phase("reduce"):
            result = aligned_array(self._bucket.count, self._bucket.dtype)
            reduce_into(result, iter(self._rows[self._turn]), self._op)
        return result


class _Sliced:
    """Each rank reduces a slice, chunk by chunk, into a result that all see."""

    is_shared = True

    def __init__(self, node: Node, bucket: Bucket, op: ReduceOp):
        self._node, self._bucket, self._op = node, bucket, op
        bounds = slice_bounds(bucket.count, node.size, bucket.dtype.itemsize)
        self._mine = slice(*bounds[node.rank : node.rank + 2])
        self._chunks = _chunks(bucket, self._mine)
        self._stride = aligned(bucket.nbytes, PAGE)
        self._turn = 0
        scratch = node.scratch(3 * CHUNK_NBYTES).view(bucket.dtype)
        way = RemoteRead if node.may_read and bucket.nbytes >= READ_NBYTES else CopyIn
        self._way = way(node, bucket, bounds, scratch.reshape(3, -1))
        self.nbytes = RESULTS * self._stride + aligned(self._way.nbytes, PAGE)

    def settle(self, segment: Segment, offset: int) -> None:
        self._results = [
            segment.array(offset + turn * self._stride, self._bucket.count, self._bucket.dtype)
            for turn in range(RESULTS)
        ]
        places = [offset + turn * self._stride for turn in range(RESULTS)]
        windows = [segment.window(place, self._bucket.nbytes) for place in places]
        here = [window for window in windows if window is not None]
        self._lending = ResultLease(here, self._bucket.dtype) if here else None
        # By turn: where each chunk of the result is.
        self._places = [
            [(result[chunk.low : chunk.high], chunk) for chunk in self._chunks]
            for result in self._results
        ]
        self._way.settle(segment, offset + RESULTS * self._stride, self._results)

    def publish(self, arrays: Sequence[np.ndarray]) -> None:
        self._way.publish(arrays, self._next_turn())

    @property
    def is_held(self) -> bool:
        lending = self._lending
        return lending is not None and lending.is_held((self._next_turn() + 1) % RESULTS)

    def lend(self) -> np.ndarray | None:
        return None if self._lending is None else self._lending.lend(self._turn)

    def reduce(self, finish: Finish | None = None) -> np.ndarray:
        # Only now, when all have come for the same call: the turns of the ranks stay equal.
        self._turn = self._next_turn()
        result = self._results[self._turn]
        trouble = None
        try:
            with spans.phase("reduce"):
                pieces = (
                    (place, self._way.parts(chunk, self._turn))
                    for place, chunk in self._places[self._turn]
                )
                reduce_each(pieces, self._bucket.dtype, self._op)
        except Exception as error:  # whatever it is, others wait for this slice, on all nodes
            trouble = error
        whole = trouble is None
        if finish is not None:
            whole = finish(result[self._mine], whole)
        with spans.phase("wait for slices"):
            together = self._node.meet(DONE if whole else FAILED)
        self._way.forget()
        if not (whole and together):
            what = "an error on another rank" if trouble is None else repr(trouble)
            raise SliceError(what) from trouble
        return result

    def _next_turn(self) -> int:
        return (self._turn + 1) % RESULTS


def _chunks(bucket: Bucket, part: slice) -> list[Piece]:
    """Cuts a slice of a bucket into chunks that a core's cache holds.

    A large array's elements are a chunk by themselves, so that they are read where they lie;
    small arrays are put together.
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
