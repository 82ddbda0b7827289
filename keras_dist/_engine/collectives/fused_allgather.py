"""The plan of a repeated allgather: slices of the same list of arrays, one slice for each rank."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist._engine.buckets import Bucket, BucketRange, aligned, plan_buckets
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.topology import first_error
from keras_dist._engine.mpi.transfer import allgather_parts, as_bytes
from keras_dist._engine.recovery.retry import retry
from keras_dist._engine.result_memory import ResultMemory
from keras_dist._engine.shm.bucket_reduction import RESULTS
from keras_dist._engine.shm.cow_mapping import PAGE
from keras_dist._engine.shm.segments import Segment
from keras_dist._engine.shm.zero_copy import ResultLease
from keras_dist._engine.signature import CollectiveSignature, entries_of
from keras_dist._engine.tracing import spans

# Arrays are cut at multiples of this size. Loops over vectors compute the elements that fill no
# vector one by one, some functions with other last bits: so a cut leaves no such elements.
CUT_NBYTES = 512


class FusedAllgather:
    """Gathers the same list of arrays repeatedly; each rank contributes a slice.

    Arrays of one dtype are laid out in a row, which is cut into a slice for each rank. So a rank
    has one contiguous part of each array, which may be empty, and all ranks have slices of about
    the same length, see `CUT_NBYTES`.

    On one node a rank writes its slice into shared memory and reads the others in place: one
    rendezvous and no copy. The memory is used as that of `bucket_reduction`.

    Args:
        specs: shape and dtype of each array.
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
        self._results: list[_Results] | None = None

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
        """Gathers the list. Collective: every rank; blocks.

        Returns:
            The whole arrays, in their shapes. They may be read in place until the second following
            call.
        """
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
            call = self._call
            if any(result.is_held for result in current):
                call = dataclasses.replace(call, holds=True)
            if rendezvous(comm, call):
                # Lent results stay as they are: nobody writes to this memory from now on.
                self._results = None
            with spans.phase("gather"):
                for result in current:
                    whole = result.bucket.unpack(result.take())
                    slots = result.bucket.slots
                    gathered.update((s.index, w) for s, w in zip(slots, whole, strict=True))
        return [gathered[index] for index in range(len(slices))]

    def _make_results(self) -> list["_Results"]:
        comm = self._comm
        pairs = list(zip(self._buckets, self._bounds, strict=True))
        if comm.node is None or not comm.is_one_node:
            return [_Messages(comm, *pair) for pair in pairs]
        results = [_Shared(comm, *pair) for pair in pairs]
        total = sum(result.nbytes for result in results)
        segment, reason = comm.node.segment(max(1, total), private_view=True)
        reason = first_error(comm.world, reason)
        if reason is not None or segment is None:
            comm.warn_no_shared_memory(reason)
            return [_Messages(comm, *pair) for pair in pairs]
        offset = 0
        for result in results:
            result.bind_memory(segment, offset)
            offset += result.nbytes
        return list(results)


def _cut(bucket: Bucket, near: int) -> int:
    """Returns where to cut a bucket: at or before an element, or at the end."""
    step = CUT_NBYTES // bucket.dtype.itemsize
    for slot in bucket.slots:
        if near < slot.offset + slot.count:
            return slot.offset + max(0, near - slot.offset) // step * step
    return bucket.count


class _Results:
    """The results of one bucket: all ranks' slices in a row."""

    def __init__(self, comm: Communicator, bucket: Bucket, bounds: Sequence[int]):
        self.bucket, self._bounds, self._comm = bucket, bounds, comm
        self._piece = BucketRange(bucket, *bounds[comm.rank : comm.rank + 2])

    @property
    def is_held(self) -> bool:
        """Whether a result is held whose memory is written next."""
        return False

    def publish(self, slices: Sequence[np.ndarray]) -> None:
        """Makes the slices of this rank visible to the others, before the rendezvous."""
        raise NotImplementedError

    def take(self) -> np.ndarray:
        """Returns the whole bucket, after the rendezvous."""
        raise NotImplementedError

    def _pack_into(self, target: np.ndarray, slices: Sequence[np.ndarray]) -> None:
        """Writes the slices of this rank where they belong in its slice of the bucket."""
        for slot, _, at, count in self._piece.parts:
            target[at : at + count] = slices[slot].reshape(-1)


class _Messages(_Results):
    """Results of ranks that share no memory."""

    def __init__(self, comm: Communicator, bucket: Bucket, bounds: Sequence[int]):
        super().__init__(comm, bucket, bounds)
        self._memory = ResultMemory(bucket.count, bucket.dtype)
        self._mine = np.zeros(len(self._piece), bucket.dtype)
        self._counts = np.diff(bounds).astype(np.int64) * bucket.dtype.itemsize

    def publish(self, slices: Sequence[np.ndarray]) -> None:
        self._pack_into(self._mine, slices)

    def take(self) -> np.ndarray:
        whole = self._memory.take()
        allgather_parts(self._comm.world, as_bytes(self._mine), as_bytes(whole), self._counts)
        return whole


class _Shared(_Results):
    """Results in the shared memory of a node, used in turn and lent."""

    def __init__(self, comm: Communicator, bucket: Bucket, bounds: Sequence[int]):
        super().__init__(comm, bucket, bounds)
        self._stride = aligned(bucket.nbytes, PAGE)
        self._turn = 0
        self._memory = ResultMemory(bucket.count, bucket.dtype)
        self.nbytes = RESULTS * self._stride

    def bind_memory(self, segment: Segment, offset: int) -> None:
        """Uses a part of a segment, `offset` bytes from its start."""
        offsets = [offset + turn * self._stride for turn in range(RESULTS)]
        self._whole = [
            segment.array(start, self.bucket.count, self.bucket.dtype) for start in offsets
        ]
        views = [segment.private_view(start, self.bucket.nbytes) for start in offsets]
        known = [view for view in views if view is not None]
        self._lease = ResultLease(known) if known else None

    @property
    def is_held(self) -> bool:
        following = (self._turn + 1) % RESULTS
        return self._lease is not None and bool(self._lease.held >> following & 1)

    def publish(self, slices: Sequence[np.ndarray]) -> None:
        # Before the rendezvous, but a call that fails there uses the same turn again.
        low, high = self._piece.low, self._piece.high
        self._pack_into(self._whole[self._turn][low:high], slices)

    def take(self) -> np.ndarray:
        turn = self._turn
        self._turn = (turn + 1) % RESULTS
        if self._lease is not None:
            lent = self._lease.lend(turn, self.bucket.count, self.bucket.dtype)
            if lent is not None:
                return lent
        copied = self._memory.take()
        np.copyto(copied, self._whole[turn])
        return copied
