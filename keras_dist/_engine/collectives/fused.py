"""The plan of a repeated reduction: the same list of arrays, fused into buckets."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, check_dtype, check_factors, reduce_into, scaled
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.collectives.adasum import adasum
from keras_dist._engine.collectives.cross_node import CrossNodeReduction
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.progress import count_update
from keras_dist._engine.mpi.peers import Payload
from keras_dist._engine.mpi.topology import first_error
from keras_dist._engine.options import OpOptions, PlanOptions
from keras_dist._engine.ordering.ticket import Handle
from keras_dist._engine.recovery.retry import retry
from keras_dist._engine.result_memory import ResultMemory
from keras_dist._engine.shm.bucket_reduction import (
    RESULTS,
    BucketReduction,
    Full,
    SliceError,
    bucket_reduction,
)
from keras_dist._engine.signature import entries_of
from keras_dist._engine.tracing import spans

__all__ = ["FusedAllreduce"]

PAYLOAD_ALONE = b"payload follows."  # 16 bytes, as a digest


class FusedAllreduce:
    """Reduces the same list of arrays repeatedly, fused into buckets.

    The plan is made once, with the digests of its buckets. The ranks compare the digest of each
    bucket, so a rank with other arrays is found before data moves.

    Args:
        comm: the ranks.
        names: names of the arrays in messages.
        specs: shape and dtype of each array.
        options: the reduction; Adasum combines each array separately and compresses nothing.
        plan: how it runs.

    Raises:
        ArgumentTypeError: the reduction is not defined for one of the dtypes.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        options: OpOptions,
        plan: PlanOptions,
    ):
        for name, (_, dtype) in zip(names, specs, strict=True):
            check_dtype(dtype, options.op, comm.where(), name)
            check_factors(dtype, options.prescale, options.postscale, comm.where(), name)
        self.comm = comm
        self.overlaps = plan.overlaps
        self._options, self._plan = options, plan
        self.lends = plan.lend
        self.buckets = plan_buckets(specs, plan.bucket_nbytes, plan.first_nbytes, plan.groups)
        self.call = options.signature(
            plan.operation,
            entries=entries_of(names, specs),
            buckets=tuple(tuple(slot.index for slot in bucket.slots) for bucket in self.buckets),
            spares=options.op is not ReduceOp.ADASUM,
            remedy=plan.remedy,
        )
        self._calls = [
            dataclasses.replace(self.call, bucket=number) for number in range(len(self.buckets))
        ]
        self._first_call = dataclasses.replace(self.call, first=True)
        self._size = comm.size
        self._connect()
        # Of the last bucket: whether it went through shared memory alone; its result in the memory
        # of all ranks, if it was lent.
        self._needs_no_mpi = False
        self._shared_result: np.ndarray | None = None

    def _connect(self) -> None:
        """Drops memory and wire formats: those of other ranks, or of ranks that have died."""
        self._losses = self.comm.faults.losses
        self._shared: dict[int, BucketReduction] | None = None
        self._results = self._new_results()
        self._cross_node = CrossNodeReduction(
            self.comm, self.buckets, self._options.op, self._options.compression
        )

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces the whole list. Collective: every rank; blocks."""
        reduced: dict[int, np.ndarray] = {}
        for number, indices in enumerate(self.call.buckets):
            results = self.reduce_bucket(number, [arrays[index] for index in indices])
            reduced.update(zip(indices, results, strict=True))
        return [reduced[index] for index in range(len(arrays))]

    def reduce_bucket(
        self, number: int, arrays: Sequence[np.ndarray], lend: bool = True
    ) -> list[np.ndarray]:
        """Reduces the arrays of one bucket.

        Collective: every rank, bucket after bucket in the order of `buckets`; blocks.

        Args:
            number: index of the bucket.
            arrays: arrays of this rank, in the order of the slots of the bucket.
            lend: whether results may be lent, if the plan lends. Ranks may differ in it.

        Returns:
            The reduced arrays, in the same order: views of one buffer.
        """
        self._follow_ranks()
        if self._plan.counts_updates and number == 0:
            count_update()
        work = functools.partial(self._reduce_bucket, number, arrays, lend)
        return retry(
            self.comm,
            work,
            needs_no_mpi=lambda: self._needs_no_mpi,
            lasting=functools.partial(self._lasting_result, number),
        )

    def bound_to(self, number: int, lend: bool = True) -> Callable[..., list[np.ndarray]]:
        """Returns `reduce_bucket` for one bucket; it takes the arrays as its arguments."""
        return lambda *arrays: self.reduce_bucket(number, arrays, lend)

    def queue_bucket(self, number: int, arrays: Sequence[np.ndarray]) -> Handle:
        """Queues `reduce_bucket`. Collective, as the operation itself; does not block.

        Do not change the arrays before the operation has ended.
        """
        work = functools.partial(self.reduce_bucket, number, arrays)
        return self.comm.order.queue(work, self.call.operation)

    @property
    def nbytes(self) -> int:
        """Size in bytes of its memory: of results, and of what the ranks of the largest node share.

        It is the same on all ranks.
        """
        if self._shared is None:
            return 0
        rows = RESULTS + max(map(len, self.comm.topology.nodes))
        return sum(rows * bucket.nbytes for bucket in self.buckets)

    def release(self) -> None:
        """Frees its memory until the plan is used again; the same on all ranks."""
        self._shared = None
        self._results = self._new_results()

    def _new_results(self) -> list[ResultMemory]:
        return [ResultMemory(bucket.count, bucket.dtype) for bucket in self.buckets]

    def _follow_ranks(self) -> None:
        """Moves the plan to the communicator of the current ranks."""
        comm = self.comm if self._plan.ranks is None else self._plan.ranks()
        if comm is not self.comm:
            self.comm = comm
            self._connect()

    def _reduce_bucket(
        self, number: int, arrays: Sequence[np.ndarray], lend: bool
    ) -> list[np.ndarray]:
        bucket, self._shared_result = self.buckets[number], None
        if self._options.op is ReduceOp.ADASUM:
            names = [self.call.entries[slot.index].name for slot in bucket.slots]
            return adasum(self.comm, arrays, names, self._options, self._plan.counts_updates)
        if self.call.prescale != 1:
            arrays = [scaled(array, self.call.prescale) for array in arrays]
        with self.comm.lock:
            if self._losses != self.comm.faults.losses:
                self._connect()
            self._needs_no_mpi = self.comm.is_one_node and number in (self._shared or {})
            if self._shared is None:
                self._shared = self._share_memory()
            reduction = (self._shared or {}).get(number)
            payload = self._payload(number, arrays, reduction)
            is_held = self._meet(number, arrays, reduction, payload)
            if self.comm.faults.joined is not None:
                return bucket.unpack(self._reduce_among(bucket.pack(arrays)))
            if self._plan.counts_updates and number == 0:
                self.comm.idle_memory.used(self)
            if is_held:
                # Lent results stay as they are: nobody writes to this memory from now on.
                self.lends, self._shared = False, None
            if payload is not None:
                flat = self._take(payload, reduction)
            elif reduction is None:
                flat = self._reduce_through_mpi(number, arrays)
            else:
                flat = self._reduce_on_node(number, reduction, lend)
        factor = self._postscale(self.comm.size)
        if factor != 1:
            self._shared_result = None
        return bucket.unpack(scaled(flat, factor))

    def _payload(
        self, number: int, arrays: Sequence[np.ndarray], reduction: BucketReduction | None
    ) -> Payload | None:
        """Returns the bucket as a payload, if it travels with the digests."""
        # If memory could not be shared, ranks of a node have no sum of their own.
        has_sum = reduction is not None or self.comm.node is None
        if not has_sum or not self._cross_node.travels(number):
            return None
        message = self._cross_node.message(number)
        if isinstance(reduction, Full):
            load = functools.partial(reduction.reduce_published, message.numbers)
        else:
            load = functools.partial(self.buckets[number].pack_into, message.numbers, arrays)
        return Payload(message, load, self._results[number].take())

    def _take(self, payload: Payload, reduction: BucketReduction | None) -> np.ndarray:
        """Returns the result that has travelled with the digests."""
        while not payload.arrived:
            # Ranks differed, but not in the operation.
            self.comm.digests.compare(PAYLOAD_ALONE, payload)
        if isinstance(reduction, Full):
            reduction.next_turn()
        self._cross_node.finish_payload(payload.result)
        return payload.result

    def _meet(
        self,
        number: int,
        arrays: Sequence[np.ndarray],
        reduction: BucketReduction | None,
        payload: Payload | None,
    ) -> bool:
        """Publishes the arrays and waits for all ranks; returns whether a result is still held."""
        call = self._calls[number]
        if reduction is not None:
            with spans.phase("copy in"):
                reduction.publish(arrays)
            if reduction.is_held:
                call = dataclasses.replace(call, holds=True)
        return rendezvous(self.comm, call, self._plan.counts_updates, payload)

    def _reduce_through_mpi(self, number: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
        bucket, [first, *others] = self.buckets[number], arrays
        if not others and first.flags.c_contiguous and self.comm.size > 1:
            source, target = first.reshape(-1), self._results[number].take()
        else:
            with spans.phase("copy in"):
                source = target = self._results[number].take()
                bucket.pack_into(target, arrays)
        if self.comm.size > 1:
            with spans.phase("reduce through MPI"):
                self._cross_node.reduce(number, source, target)
        return target

    def _reduce_on_node(self, number: int, reduction: BucketReduction, lend: bool) -> np.ndarray:
        try:
            flat = reduction.reduce(self._cross_node.finish(number))
        except SliceError as failure:
            expected = "every rank to reduce its slice of a bucket"
            remedy = "See the traceback of the rank that failed."
            raise errors.RankError(
                errors.explain(self.comm.where(), expected, str(failure), remedy)
            ) from failure
        lent = reduction.lend() if lend and self.lends else None
        if lent is not None:
            self._shared_result = flat
            return lent
        if not reduction.is_shared:
            return flat
        with spans.phase("copy out"):
            copied = self._results[number].take()
            np.copyto(copied, flat)
        return copied

    def _reduce_among(self, flat: np.ndarray) -> np.ndarray:
        """Reduces a bucket over the ranks that have not joined, uncompressed."""
        rows = exchange_among(self.comm, flat)
        reduce_into(flat, iter(rows), self._options.op)
        return scaled(flat, self._postscale(len(rows)))

    def _postscale(self, ranks: int) -> float:
        """Returns the factor of the results of a number of ranks."""
        share = self._size / ranks if self._plan.divides else 1.0
        return self.call.postscale * share

    def _lasting_result(self, number: int) -> list[np.ndarray] | None:
        """Returns the last result of a bucket in memory no script can write, if it was lent."""
        flat = self._shared_result
        return None if flat is None else self.buckets[number].unpack(flat)

    def _share_memory(self) -> dict[int, BucketReduction] | None:
        """Allocates the shared memory of the buckets that use it; returns them by number.

        Collective: the ranks meet first, so that ranks that differ raise. Returns `None` while
        some ranks have joined: the memory is allocated when they are back.
        """
        node = self.comm.node
        if node is None:
            return {}
        rendezvous(self.comm, self._first_call)
        if self.comm.faults.joined is not None:
            exchange_among(self.comm, None)
            return None
        op = self._cross_node.op_on_node
        slices = self.comm.topology.slices
        every = [bucket_reduction(node, bucket, op, slices) for bucket in self.buckets]
        reductions = {
            n: reduction for n, reduction in enumerate(every) if self._shares_memory(n, reduction)
        }
        total = sum(reduction.nbytes for reduction in reductions.values())
        segment, reason = node.segment(max(1, total), private_view=self.lends)
        reason = first_error(self.comm.world, reason)
        if reason is not None or segment is None:
            self.comm.warn_no_shared_memory(reason)
            return {}
        offset = 0
        for reduction in reductions.values():
            reduction.bind_memory(segment, offset)
            offset += reduction.nbytes
        return reductions

    def _shares_memory(self, number: int, reduction: BucketReduction) -> bool:
        """Returns whether a bucket uses shared memory.

        On several nodes a small one does only if it crosses them with the digests.
        """
        if self.comm.is_one_node:
            return True
        if not reduction.is_shared:
            return self._cross_node.travels(number)
        return self._cross_node.reduces_on_node(number)
