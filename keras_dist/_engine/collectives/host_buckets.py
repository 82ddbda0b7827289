"""The buckets of a plan, reduced on the host: in shared memory, by MPI, or with the digests."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, reduce_into, scaled
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.collectives.adasum import adasum
from keras_dist._engine.collectives.cross_node import (
    CrossNodeReduction,
    Widening,
    contribution,
    slice_payload,
)
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.plan_memory import OwnMemory, PlanMemory, PooledMemory
from keras_dist._engine.collectives.rendezvous import (
    SLICES,
    rank_error,
    rendezvous,
    rendezvous_for_payload,
)
from keras_dist._engine.collectives.tables import SparseTable, TableRows, most_rows
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.progress import count_update
from keras_dist._engine.mpi.peers import Payload
from keras_dist._engine.recovery import retry
from keras_dist._engine.shm.bucket_reduction import (
    SMALL_NBYTES,
    BucketReduction,
    Full,
    Sliced,
    SliceError,
)
from keras_dist._engine.signature import (
    BucketOptions,
    CollectiveSignature,
    Entry,
    OpOptions,
    entries_of,
)
from keras_dist._engine.tracing import spans


class HostBuckets:
    """The buckets of a plan, with the memory in which the host reduces them."""

    by_rows = TableRows  # how backends, which do not import the engine, give the rows of a table

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        options: OpOptions,
        plan: BucketOptions,
        whole: CollectiveSignature | None = None,
    ):
        self.comm = comm
        self.options, self._plan = options, plan
        self.buckets = plan_buckets(
            specs, plan.bucket_nbytes, plan.first_nbytes, plan.groups, plan.overlaps, plan.tables
        )
        by_slot = {bucket.slots[0].index: n for n, bucket in enumerate(self.buckets)}
        # By number of the bucket.
        self._tables = {
            by_slot[table]: SparseTable(self.buckets[by_slot[table]]) for table in plan.tables
        }
        entries = entries_of(names, specs)
        self.call = whole or options.signature(
            plan.operation,
            entries=entries,
            buckets=tuple(tuple(slot.index for slot in bucket.slots) for bucket in self.buckets),
            spares=options.op is not ReduceOp.ADASUM,
            remedy=plan.remedy,
        )
        if whole is None:
            numbers = range(len(self.buckets))
            self.calls = [dataclasses.replace(self.call, bucket=number) for number in numbers]
        else:
            self.calls = _calls_of_pieces(whole, entries)
        self._first_call = dataclasses.replace(self.call, first=True)
        self._size = comm.size
        self._connect()
        # Of the last bucket: whether it went through shared memory alone; its result in the memory
        # of all ranks, if it was lent.
        self._needs_no_mpi = False
        self._shared_result: np.ndarray | None = None

    def _connect(self) -> None:
        """Drops memory and wire formats: those of other ranks, or of ranks that have died."""
        self._changes = self.comm.faults.changes
        self._cross_node = cross_node = CrossNodeReduction(
            self.comm, self.buckets, self.options.op, self.options.compression
        )
        self.memory: PlanMemory
        if self._plan.pooled:
            self.memory = PooledMemory(self.comm, cross_node, self._first_call)
        else:
            self.memory = OwnMemory(self.comm, cross_node, self._first_call, self._plan.lend)

    @property
    def lends(self) -> bool:
        """Whether results may lie in memory that all ranks share."""
        return self.memory.lends

    def rows_of_tables(self) -> list[int]:
        """Returns for each array how many of its rows may be given as `TableRows`; 0 if none."""
        # The result of such an array is `TableRows` too, unless those of all ranks are too many.
        most = [0] * len(self.call.entries)
        for number in self._tables:
            [slot] = self.buckets[number].slots
            most[slot.index] = most_rows(slot.shape[0], self.comm.size)
        return most

    def release(self) -> None:
        self.memory.release()
        for table in self._tables.values():
            table.release()

    def reduce_on_host(
        self, number: int, arrays: Sequence[np.ndarray], lend: bool
    ) -> list[np.ndarray]:
        """Reduces the arrays of one bucket. Collective: every rank; blocks."""
        self.count(number)
        work = functools.partial(self._reduce_bucket, number, arrays, lend)
        return retry(
            self.comm,
            work,
            needs_no_mpi=lambda: self._needs_no_mpi,
            lasting=functools.partial(self._lasting_result, number),
        )

    def _reduce_bucket(
        self, number: int, arrays: Sequence[np.ndarray], lend: bool
    ) -> list[np.ndarray]:
        self._shared_result = None
        if self.options.op is ReduceOp.ADASUM:
            names = [self.call.entries[slot.index].name for slot in self.buckets[number].slots]
            return adasum(self.comm, arrays, names, self.options, self._plan.counts_updates)
        if self.call.prescale != 1:
            arrays = [_scaled(array, self.call.prescale) for array in arrays]
        with self.comm.lock:
            if self._changes != self.comm.faults.changes:
                self._connect()
            # Where others continue without a rank that dies, they keep a copy of each such result.
            if number in self._tables and self.comm.faults.retry is None:
                reduced = self._reduce_table(number, arrays[0])
                if reduced is not None:
                    return reduced
            arrays = [_dense(array) for array in arrays]
            is_ready = self.memory.ready_reduction(number) is not None
            self._needs_no_mpi = self.comm.is_one_node and is_ready
            reduction = self.memory.reduction(number)
            given, widening = arrays, self.widening(number)
            if widening is not None and self.travels(number, reduction):
                given = [widening.widen(arrays)]
            payload = self.payload(number, given, reduction)

            def publish() -> None:
                if reduction is not None:
                    with spans.phase("copy in"):
                        reduction.publish(given)

            notices = self._plan.counts_updates
            rendezvous(self.comm, self.calls[number], notices, payload, publish)
            return self.finish(number, arrays, lend, reduction, payload)

    def _reduce_table(self, number: int, given: np.ndarray | TableRows) -> list[Any] | None:
        """Reduces a table by its rows; returns `None` if these are too many, on all ranks."""
        table, comm, is_known = self._tables[number], self.comm, isinstance(given, TableRows)
        rows = table.rows(given, finds=self._plan.finds_rows)
        rendezvous(comm, self.calls[number], self._plan.counts_updates)
        if comm.faults.joined is not None:
            return self.finish(number, [_dense(given)], False, None)
        reduced = table.reduce(comm, rows, self.options.op, self.postscale(comm.size))
        if reduced is None:
            return None
        if self._plan.counts_updates and number == 0:
            comm.idle_memory.used(self)
        return [reduced if is_known else table.whole(reduced)]

    def finish(
        self,
        number: int,
        arrays: Sequence[np.ndarray],
        lend: bool,
        reduction: BucketReduction | None,
        payload: Payload | None = None,
    ) -> list[np.ndarray]:
        """Reduces a bucket that is published, after the rendezvous, with the lock held."""
        bucket = self.buckets[number]
        if self.comm.faults.joined is not None:
            return bucket.unpack(self.reduce_among(bucket.pack(arrays)))
        if self._plan.counts_updates and number == 0:
            self.comm.idle_memory.used(self)
        if payload is not None:
            flat = self.take(number, payload, reduction, lend)
        elif reduction is None:
            flat = self._reduce_through_mpi(number, arrays)
        else:
            flat = self.reduce_on_node(number, reduction, lend)
        widening, factor = self.widening(number), self.postscale(self.comm.size)
        if widening is not None and payload is not None:
            flat = widening.narrow(flat, self.comm.size)
        if widening is not None or factor != 1:
            self._shared_result = None
        return bucket.unpack(scaled(flat, factor))

    def widening(self, number: int) -> Widening | None:
        """Returns how a bucket is widened where it travels between nodes; `None` if it is not."""
        return self._cross_node.widened.get(number)

    def travels(self, number: int, reduction: BucketReduction | None) -> bool:
        # If memory could not be shared, ranks of a node have no sum of their own.
        has_sum = reduction is not None or self.comm.node is None
        return has_sum and self._cross_node.travels(number)

    def payload(
        self, number: int, arrays: Sequence[np.ndarray], reduction: BucketReduction | None
    ) -> Payload | None:
        if not self.travels(number, reduction):
            return None
        if isinstance(reduction, Sliced):
            return slice_payload(self._cross_node, number, reduction)
        bucket, result = self._cross_node.buckets[number], self.memory.result(number)
        return self._cross_node.payload(
            number, lambda _: contribution(bucket, arrays, reduction, result), result
        )

    def take(
        self, number: int, payload: Payload, reduction: BucketReduction | None, lend: bool = True
    ) -> np.ndarray:
        """Returns the result that has travelled with the digests, fused; widened, if it was."""
        while not payload.arrived:
            # Ranks differed, but not in the operation.
            rendezvous_for_payload(self.comm, self.calls[number], payload)
        if isinstance(reduction, Full):
            reduction.next_turn()
        if not isinstance(reduction, Sliced):
            return payload.result
        return self._own_result(number, reduction, reduction.take(), lend)

    def _reduce_through_mpi(self, number: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
        bucket, [first, *others] = self.buckets[number], arrays
        if self.widening(number) is not None:  # no shared memory: the result has another dtype
            source = target = bucket.pack(arrays)
        elif not others and first.flags.c_contiguous and self.comm.size > 1:
            source, target = first.reshape(-1), self.memory.result(number)
        else:
            with spans.phase("copy in"):
                source = target = self.memory.result(number)
                bucket.pack_into(target, arrays)
        if self.comm.size > 1:
            with spans.phase("reduce through MPI"):
                self._cross_node.reduce(number, source, target)
        return target

    def reduce_on_node(
        self,
        number: int,
        reduction: BucketReduction,
        lend: bool = True,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Reduces a bucket that is published; returns it fused, in memory that stays as it is."""
        try:
            flat = reduction.reduce(self._cross_node.finish(number), out)
        except SliceError as failure:
            raise rank_error(self.comm, SLICES, str(failure)) from failure
        if isinstance(reduction, Full):
            return flat
        if out is not None:
            reduction.end()
            return out
        return self._own_result(number, reduction, flat, lend)

    def _own_result(
        self, number: int, reduction: Sliced, flat: np.ndarray, lend: bool
    ) -> np.ndarray:
        """Ends a call: returns its result where it lies, if it can be lent, or a copy."""
        lent, nbytes = None, self._cross_node.buckets[number].nbytes
        try:
            if lend and self.memory.lends and nbytes > SMALL_NBYTES:
                lent = reduction.lend()
            if lent is not None:
                self._shared_result = flat
                return lent
            with spans.phase("copy out"):
                copied = self.memory.result(number)
                np.copyto(copied, flat)
            return copied
        finally:
            reduction.end()

    def reduce_among(self, flat: np.ndarray) -> np.ndarray:
        """Reduces a bucket over the ranks that have not joined, uncompressed."""
        rows = exchange_among(self.comm, flat)
        reduce_into(flat, iter(rows), self.options.op)
        return scaled(flat, self.postscale(len(rows)))

    def count(self, number: int) -> None:
        """Counts an update, for messages, where its first bucket is reduced."""
        if self._plan.counts_updates and number == 0:
            count_update(self.comm.ranks)

    def postscale(self, ranks: int) -> float:
        share = self._size / ranks if self._plan.divides else 1.0
        return self.call.postscale * share

    def _lasting_result(self, number: int) -> list[np.ndarray] | None:
        """Returns the last result of a bucket in memory no script can write, if it was lent."""
        flat = self._shared_result
        return None if flat is None else self.buckets[number].unpack(flat)


def _scaled(given: Any, factor: float) -> Any:
    return given.scaled(factor) if isinstance(given, TableRows) else scaled(given, factor)


def _dense(given: Any) -> np.ndarray:
    return given.dense() if isinstance(given, TableRows) else given


def _calls_of_pieces(
    whole: CollectiveSignature, pieces: Sequence[Entry]
) -> list[CollectiveSignature]:
    """Returns the operations of pieces: the first compares the whole plan, so others list less."""
    others = dataclasses.replace(whole, buckets=())
    return [
        dataclasses.replace(whole, piece=0),
        *(
            dataclasses.replace(others, entries=(entry,), piece=number)
            for number, entry in enumerate(pieces[1:], 1)
        ),
    ]
