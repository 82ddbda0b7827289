"""allgather, and the plan of a repeated one: slices of the same list of arrays."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.buckets import Bucket, BucketRange, aligned, plan_buckets
from keras_dist._engine.collectives.rendezvous import by_name, raise_on_all, rendezvous
from keras_dist._engine.collectives.rows import check_rows, gather_rows
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.memory import ResultMemory
from keras_dist._engine.mpi.transfer import allgather_parts, as_bytes
from keras_dist._engine.recovery import retried, retry
from keras_dist._engine.shm.bucket_reduction import READ, RESULTS
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.region import Region, held_nbytes
from keras_dist._engine.shm.segments import PAGE
from keras_dist._engine.signature import CollectiveSignature, entries_of
from keras_dist._engine.tracing import spans

# Arrays are cut at multiples of this size. Loops over vectors compute the elements that fill no
# vector one by one, some functions with other last bits: so a cut leaves no such elements.
CUT_NBYTES = 512


class FusedAllgather:
    """Gathers the same list of arrays repeatedly; each rank contributes a slice.

    Arrays of one dtype lie in a row, which is cut into slices of about the same length, see
    `CUT_NBYTES`. On one node a rank writes its slice into shared memory and reads the others in
    place: one rendezvous, a barrier and no copy. Rows are used as those of `bucket_reduction`.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        operation: str,
        remedy: str,
        ranks: Callable[[], Communicator],
    ):
        self._buckets = plan_buckets(specs, sys.maxsize)
        self._ranks = ranks
        self._bounds = [
            [_cut(bucket, bucket.count * rank // comm.size) for rank in range(comm.size + 1)]
            for bucket in self._buckets
        ]
        indices = tuple(tuple(slot.index for slot in bucket.slots) for bucket in self._buckets)
        self._call = CollectiveSignature(
            operation, entries_of(names, specs), buckets=indices, remedy=remedy
        )
        self._first_call = dataclasses.replace(self._call, first=True)
        self._connect(comm)

    def _connect(self, comm: Communicator) -> None:
        self._comm = comm
        self._results: Sequence[_Messages] | None = None

    def part(self, index: int, rank: int) -> slice:
        """Returns the part of an array, flattened, that a rank contributes."""
        for bucket, bounds in zip(self._buckets, self._bounds, strict=True):
            for slot in bucket.slots:
                if slot.index == index:
                    low, high = (
                        min(max(bound - slot.offset, 0), slot.count)
                        for bound in bounds[rank : rank + 2]
                    )
                    return slice(low, high)
        raise IndexError(index)

    def __call__(self, slices: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gathers the list, in memory that is not written while in use. Collective; blocks."""
        if (comm := self._ranks()) is not self._comm:
            self._connect(comm)
        return retry(self._comm, functools.partial(self._gather, slices))

    def _gather(self, slices: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._ranks()  # raises if a rank has died since, as its slice is lost
        comm, gathered = self._comm, dict[int, np.ndarray]()
        with comm.lock:
            if self._results is None:
                rendezvous(comm, self._first_call)
                self._results = self._make_results()
            current = self._results
            with spans.phase("copy in"):
                for result in current:
                    result.publish([slices[slot.index] for slot in result.bucket.slots])
            rendezvous(comm, self._call)
            with spans.phase("gather"):
                for result in current:
                    whole = result.bucket.unpack(result.take())
                    slots = result.bucket.slots
                    gathered.update((s.index, w) for s, w in zip(slots, whole, strict=True))
        return [gathered[index] for index in range(len(slices))]

    def _make_results(self) -> Sequence["_Messages"]:
        comm, node = self._comm, self._comm.node
        pairs = list(zip(self._buckets, self._bounds, strict=True))
        rows = [aligned(max(1, bucket.nbytes), PAGE) for bucket in self._buckets]
        sizes = [held_nbytes(comm.size) + RESULTS * row for row in rows]
        segment = comm.segment(max(1, sum(sizes)), private_view=True) if comm.is_one_node else None
        if node is None or segment is None:
            return [_Messages(comm, *pair) for pair in pairs]
        starts = itertools.accumulate(sizes, initial=0)
        regions = [Region(segment, *each, False) for each in zip(starts, rows, sizes, strict=False)]
        return [
            _Shared(node, region, comm, *pair) for region, pair in zip(regions, pairs, strict=True)
        ]


def _cut(bucket: Bucket, near: int) -> int:
    """Returns where to cut a bucket: at or before an element, or at the end."""
    step = CUT_NBYTES // bucket.dtype.itemsize
    for slot in bucket.slots:
        if near < slot.offset + slot.count:
            return slot.offset + max(0, near - slot.offset) // step * step
    return bucket.count


class _Messages:
    """The results of one bucket, of ranks that share no memory: all ranks' slices in a row."""

    def __init__(self, comm: Communicator, bucket: Bucket, bounds: Sequence[int]):
        self.bucket, self._comm = bucket, comm
        self._piece = BucketRange(bucket, *bounds[comm.rank : comm.rank + 2])
        self._memory = ResultMemory(bucket.count, bucket.dtype)
        self._mine = np.zeros(len(self._piece), bucket.dtype)
        ends = [bound * bucket.dtype.itemsize for bound in bounds]
        self._ends = list(itertools.pairwise(ends))

    def publish(self, slices: Sequence[np.ndarray]) -> None:
        """Makes the slices of this rank visible to the others, before the rendezvous."""
        self._pack_into(self._mine, slices)

    def take(self) -> np.ndarray:
        """Returns the whole bucket, after the rendezvous."""
        whole = self._memory.take()
        allgather_parts(self._comm.world, as_bytes(self._mine), as_bytes(whole), self._ends)
        return whole

    def _pack_into(self, target: np.ndarray, slices: Sequence[np.ndarray]) -> None:
        """Writes the slices of this rank where they belong in its slice of the bucket."""
        for slot, _, at, count in self._piece.parts:
            target[at : at + count] = slices[slot].reshape(-1)


class _Shared(_Messages):
    """The results of one bucket in a region of the node's memory, in rows that are lent."""

    def __init__(self, node: Node, region: Region, comm: Communicator, bucket: Bucket, bounds: Any):
        super().__init__(comm, bucket, bounds)
        self._node, self._rows = node, region.make_results(RESULTS, node.rank, node.size)
        self._whole = [region.row(row, bucket.count, bucket.dtype) for row in range(RESULTS)]

    def publish(self, slices: Sequence[np.ndarray]) -> None:
        # Before the rendezvous, but a call that fails there uses the same row again.
        mine = self._whole[self._rows.next][self._piece.low : self._piece.high]
        self._pack_into(mine, slices)
        self._rows.announce()

    def take(self) -> np.ndarray:
        row = self._rows.advance()
        whole = self._rows.lend(self.bucket.count, self.bucket.dtype)
        if whole is None:
            whole = self._memory.take()
            np.copyto(whole, self._whole[row])
        # No rank announces the next call before all have chosen its row, and have copied this one.
        self._node.barrier(READ)
        return whole


def allgather(
    comm: Communicator, array: np.ndarray, name: str, key: str | None = None
) -> np.ndarray:
    """Concatenates the arrays of all ranks along the first dimension. Collective; blocks."""
    return grouped_allgather(comm, [array], [name], key)[0]


@by_name
@retried
def grouped_allgather(
    comm: Communicator, arrays: Sequence[np.ndarray], names: Sequence[str], key: str | None = None
) -> list[np.ndarray]:
    """Concatenates each array of a list, as `allgather`, in one message. Collective; blocks."""
    with raise_on_all(comm, "allgather", key):
        for name, array in zip(names, arrays, strict=True):
            check_rows(comm, array, name, "to gather along")
    specs = [((-1, *array.shape[1:]), array.dtype) for array in arrays]
    with comm.lock:
        rendezvous(comm, CollectiveSignature("allgather", entries_of(names, specs), key=key))
        if not arrays:
            return []
        mine = np.array([len(array) for array in arrays], np.int64)
        lengths = [raw.view(np.int64).tolist() for raw in comm.allgather_bytes(mine.tobytes())]
        return gather_rows(comm, arrays, lengths)
