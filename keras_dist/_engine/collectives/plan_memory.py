"""The memory of a plan: its own, as gradients have it, or the regions of single calls."""

from collections.abc import Callable

import numpy as np

from keras_dist._engine.buckets import Bucket, aligned, size_class
from keras_dist._engine.collectives.cross_node import CrossNodeReduction
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.memory import ResultMemory
from keras_dist._engine.shm.bucket_reduction import (
    RESULTS,
    SMALL_NBYTES,
    BucketReduction,
    Full,
    Sliced,
)
from keras_dist._engine.shm.region import Region, result_count
from keras_dist._engine.shm.segments import PAGE
from keras_dist._engine.signature import CollectiveSignature


class OwnMemory:
    """Memory of one plan, for all its buckets."""

    def __init__(
        self,
        comm: Communicator,
        cross_node: CrossNodeReduction,
        first_call: CollectiveSignature,
        lends: bool,
    ):
        self._comm, self._cross_node = comm, cross_node
        self._first_call, self.lends = first_call, lends
        self.release()

    def release(self) -> None:
        """Frees memory until the plan is used again; the same on all ranks."""
        self._reductions: dict[int, BucketReduction] | None = None
        buckets = self._cross_node.buckets
        self._results = [ResultMemory(bucket.count, bucket.dtype) for bucket in buckets]

    def reduction(self, number: int) -> BucketReduction | None:
        """Returns the reduction of a bucket, `None` if by MPI; the ranks meet if memory is new."""
        if self._reductions is None:
            self._reductions = self._allocate()
        return self.ready_reduction(number)

    def ready_reduction(self, number: int) -> BucketReduction | None:
        """Returns the reduction of a bucket, if all ranks have its memory. Not collective."""
        return (self._reductions or {}).get(number)

    def result(self, number: int) -> np.ndarray:
        return self._results[number].take()

    def _allocate(self) -> dict[int, BucketReduction] | None:
        """Allocates the memory of all buckets that use it; `None` while some ranks have joined."""
        node = self._comm.node
        if node is None:
            return {}
        if not _rendezvous(self._comm, self._first_call):
            return None
        made = _reductions(self._comm, self._cross_node)
        sizes = {n: each.region_nbytes(node.size, each.capacity) for n, each in made.items()}
        segment = self._comm.segment(max(1, sum(sizes.values())), private_view=self.lends)
        if segment is None:
            return {}
        offset = 0
        for number, reduction in made.items():
            region = Region(segment, offset, reduction.capacity, sizes[number], False)
            reduction.bind(region)
            offset += sizes[number]
        return made


class PooledMemory:
    """The regions of a communicator, which its single calls share."""

    def __init__(
        self, comm: Communicator, cross_node: CrossNodeReduction, first_call: CollectiveSignature
    ):
        self._comm, self._first_call = comm, first_call
        self._buckets = cross_node.buckets
        self._reductions = _reductions(
            comm, cross_node, lambda bucket: result_count(_pooled_capacity(bucket))
        )
        self._bound: dict[int, Region] = {}
        self._most = max(map(len, comm.topology.nodes))
        self.lends = True

    def release(self) -> None:
        pass  # the regions are not those of this plan

    def reduction(self, number: int) -> BucketReduction | None:
        if number not in self._reductions:
            return None
        if self._find(number) is None and self._nbytes(number) < self._comm.regions.refused:
            self._make(number)
        return self.ready_reduction(number)

    def ready_reduction(self, number: int) -> BucketReduction | None:
        reduction = self._reductions.get(number)
        region = None if reduction is None else self._find(number)
        if reduction is None or region is None:
            return None
        if self._bound.get(number) is not region:
            reduction.bind(region)
            self._bound[number] = region
        return reduction

    def result(self, number: int) -> np.ndarray:
        bucket = self._buckets[number]
        return bucket.clear_gaps(self._comm.results.take(bucket.nbytes).view(bucket.dtype))

    def _nbytes(self, number: int) -> int:
        """Returns the size of a new region, on the node with most ranks: the same on all ranks."""
        return self._reductions[number].region_nbytes(
            self._most, _pooled_capacity(self._buckets[number])
        )

    def _find(self, number: int) -> Region | None:
        is_small = isinstance(self._reductions[number], Full)
        nbytes = self._buckets[number].nbytes
        return self._comm.regions.find(nbytes, is_small, self._nbytes(number))

    def _make(self, number: int) -> None:
        """Makes a region, unless some ranks have joined, or there is no memory."""
        comm, reduction, nbytes = self._comm, self._reductions[number], self._nbytes(number)
        if comm.node is None or not _rendezvous(comm, self._first_call):
            return
        comm.regions.make_room(nbytes)
        # The views of earlier plans would keep the memory of dropped regions.
        comm.fast_calls.clear()
        comm.plans.clear()
        is_small, capacity = isinstance(reduction, Full), _pooled_capacity(self._buckets[number])
        size = reduction.region_nbytes(comm.node.size, capacity)
        segment = comm.segment(size, private_view=not is_small)
        if segment is None:
            comm.regions.refused = min(comm.regions.refused, nbytes)
            return
        comm.regions.add(Region(segment, 0, capacity, nbytes), is_small)


PlanMemory = OwnMemory | PooledMemory


def _pooled_capacity(bucket: Bucket) -> int:
    return aligned(size_class(bucket.nbytes), PAGE)


def _rendezvous(comm: Communicator, first_call: CollectiveSignature) -> bool:
    """Lets the ranks agree on the allocation; returns `False` while some have joined."""
    rendezvous(comm, first_call)
    if comm.faults.joined is not None:
        exchange_among(comm, None)
        return False
    return True


def _reductions(
    comm: Communicator,
    cross_node: CrossNodeReduction,
    results: Callable[[Bucket], int] = lambda bucket: RESULTS,
) -> dict[int, BucketReduction]:
    """Returns the reductions in shared memory; small buckets of several nodes, if they travel."""
    op, slices, node = cross_node.op_on_node, comm.topology.slices, comm.node
    if node is None:
        return {}
    whole = SMALL_NBYTES if cross_node.whole_nbytes is None else cross_node.whole_nbytes
    made: dict[int, BucketReduction] = {
        number: Full(node, bucket, op)
        if bucket.nbytes <= whole
        else Sliced(node, bucket, op, slices, results(bucket))
        for number, bucket in enumerate(cross_node.buckets)
    }

    def uses_it(number: int) -> bool:
        if comm.is_one_node:
            return True
        if isinstance(made[number], Full):
            return cross_node.travels(number)
        return cross_node.reduces_on_node(number)

    return {number: reduction for number, reduction in made.items() if uses_it(number)}
