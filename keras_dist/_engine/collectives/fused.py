"""A plan: the same list of arrays reduced again and again, in buckets."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, check_dtype, check_factors, reduce_into, scaled
from keras_dist._engine.collectives.adasum import adasum
from keras_dist._engine.collectives.buckets import aligned_array, plan_buckets
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.signature import CollectiveSignature, entries_of
from keras_dist._engine.collectives.ticket import Handle
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.compression import Compression, Compressor, Wire, wire_for
from keras_dist._engine.faults.progress import count_update
from keras_dist._engine.faults.retry import retry
from keras_dist._engine.mpi.reduction import SMALL_NBYTES, reduce_through_mpi
from keras_dist._engine.mpi.transfer import wait
from keras_dist._engine.shm.bucket_reduction import (
    BucketReduction,
    Finish,
    SliceError,
    bucket_reduction,
)
from keras_dist._engine.tracing import spans

__all__ = ["FusedAllreduce"]


class FusedAllreduce:
    """Reduces the same list of arrays again and again, fused into buckets.

    The plan is made once. The ranks compare it at every bucket, by a digest that was made
    with it, so a rank that holds other arrays is found before data moves.

    Args:
        comm: the ranks.
        names: what the arrays are called in messages.
        specs: shape and dtype of each array.
        op: the reduction; Adasum combines each array by itself and compresses nothing.
        bucket_nbytes: the size, in bytes, at which a bucket is closed.
        operation: what the call is called in messages.
        key: a name under which the ranks must meet; `None` for none.
        remedy: what a user should do when the ranks differ.
        lend: whether results may lie in memory that all ranks share, see
            `keras_dist._engine.shm.zero_copy`. Where somebody keeps one, or writes to it, they are
            copied from then on, as they are otherwise.
        prescale: factor for the contributions.
        postscale: factor for the results.
        first_nbytes: the size at which the first bucket is closed, where it is less.
        compression: what float32 and float64 look like between nodes, in buckets of more
            than `SMALL_NBYTES`: below, the number of messages counts, not their size.
        groups: indices of arrays that share a bucket, see `plan_buckets`.
        overlaps: whether its buckets should be queued as they become ready, where whoever makes
            them ready can do so.
        updates: whether it is that of gradients, by which updates are counted for messages.
        divides: whether `postscale` divides by the number of ranks, so that it has to be that of
            the ranks which are here while others have joined.
        ranks: gives the ranks of the moment: who keeps a plan, as the graph of a step does, may
            outlive those that it was made for. Defaults to `comm`, for ever.

    Raises:
        ArgumentTypeError: `op` is not defined for one of the dtypes.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        op: ReduceOp,
        bucket_nbytes: int,
        operation: str = "allreduce",
        key: str | None = None,
        remedy: str = CollectiveSignature.remedy,
        lend: bool = False,
        prescale: float = 1.0,
        postscale: float = 1.0,
        first_nbytes: int | None = None,
        compression: Compressor = Compression.none,
        groups: Sequence[Sequence[int]] = (),
        overlaps: bool = False,
        updates: bool = False,
        divides: bool = False,
        ranks: Callable[[], Communicator] | None = None,
    ):
        for name, (_, dtype) in zip(names, specs, strict=True):
            check_dtype(dtype, op, comm.where(), name)
            check_factors(dtype, prescale, postscale, comm.where(), name)
        self.comm = comm
        self.op = op
        self.lend = lend
        self.overlaps = overlaps
        self._updates = updates
        self._divides = divides
        self._ranks = ranks
        self._compression = compression
        self._wires: dict[int, Wire] = {}
        self.buckets = plan_buckets(specs, bucket_nbytes, first_nbytes, groups)
        self.call = CollectiveSignature(
            operation,
            entries_of(names, specs),
            op.value,
            key=key,
            prescale=prescale,
            postscale=postscale,
            compression=compression.name,
            buckets=tuple(tuple(slot.index for slot in bucket.slots) for bucket in self.buckets),
            spares=op is not ReduceOp.ADASUM,
            remedy=remedy,
        )
        self._calls = [
            dataclasses.replace(self.call, bucket=number) for number in range(len(self.buckets))
        ]
        self._start = dataclasses.replace(self.call, first=True)
        self._shared: dict[int, BucketReduction] | None = None
        self._losses = comm.losses  # memory and wires are those of as many ranks
        self._size = comm.size
        # Of the last bucket: whether it went through shared memory alone; its result as the ranks
        # see it, where it was lent.
        self._needs_no_mpi = False
        self._everyones: np.ndarray | None = None

    def reduce_bucket(
        self, number: int, arrays: Sequence[np.ndarray], lend: bool = True
    ) -> list[np.ndarray]:
        """Reduces the arrays of one bucket.

        Collective: every rank, bucket after bucket in the order of `buckets`; blocks.

        Args:
            number: which of `buckets`.
            arrays: this rank's arrays, in the order of the bucket's slots.
            lend: whether results may be lent where the plan lends. Ranks may differ in it.

        Returns:
            The reduced arrays, in the same order: views of one buffer.
        """
        self._move()
        if self._updates and number == 0:
            count_update()
        work = functools.partial(self._reduce_bucket, number, arrays, lend)
        return retry(
            self.comm,
            work,
            needs_no_mpi=lambda: self._needs_no_mpi,
            lasting=functools.partial(self._lasting, number),
        )

    def _move(self) -> None:
        """Leaves ranks that this process has left for those which it has joined since."""
        comm = self.comm if self._ranks is None else self._ranks()
        if comm is not self.comm:
            self.comm, self._losses = comm, comm.losses
            self._shared, self._wires = None, {}

    def _reduce_bucket(
        self, number: int, arrays: Sequence[np.ndarray], lend: bool
    ) -> list[np.ndarray]:
        bucket, self._everyones = self.buckets[number], None
        if self.op is ReduceOp.ADASUM:
            names = [self.call.entries[slot.index].name for slot in bucket.slots]
            factors = (self.call.prescale, self.call.postscale)
            return adasum(self.comm, arrays, names, self.call.key, *factors, tells=self._updates)
        if self.call.prescale != 1:
            arrays = [scaled(array, self.call.prescale) for array in arrays]
        with self.comm.lock:
            if self._losses != self.comm.losses:
                self._losses, self._shared, self._wires = self.comm.losses, None, {}
            self._needs_no_mpi = self.comm.is_one_node and number in (self._shared or {})
            if self._shared is None:
                self._shared = self._share_memory()
            reduction = (self._shared or {}).get(number)
            call = self._calls[number]
            if reduction is not None:
                with spans.phase("copy in"):
                    reduction.publish(arrays)
                if reduction.is_held:
                    call = dataclasses.replace(call, holds=True)
            is_held = rendezvous(self.comm, call, tells=self._updates)
            if self.comm.absence is not None:
                return bucket.unpack(self._reduce_among(bucket.pack(arrays)))
            if self._updates and number == 0:
                self.comm.idle_memory.used(self)
            if is_held:
                # What has been lent stays as it is: from now on nobody writes there.
                self.lend, self._shared = False, None
            if reduction is None:
                with spans.phase("copy in"):
                    flat = bucket.pack(arrays)
                if self.comm.size > 1:
                    with spans.phase("reduce through MPI"):
                        self._reduce_flat(number, flat)
            else:
                flat = self._reduce_on_node(number, reduction)
                lent = reduction.lend() if lend and self.lend else None
                if lent is not None:
                    self._everyones, flat = flat, lent
                elif reduction.is_shared:
                    with spans.phase("copy out"):
                        shared, flat = flat, aligned_array(flat.size, flat.dtype)
                        np.copyto(flat, shared)
        factor = self._postscale(self.comm.size)
        if factor != 1:
            self._everyones = None
        return bucket.unpack(scaled(flat, factor))

    def _lasting(self, number: int) -> list[np.ndarray] | None:
        """Returns the last results of a bucket where no script writes, if they were lent."""
        flat = self._everyones
        return None if flat is None else self.buckets[number].unpack(flat)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces the whole list. Collective: every rank; blocks."""
        reduced: dict[int, np.ndarray] = {}
        for number, indices in enumerate(self.call.buckets):
            results = self.reduce_bucket(number, [arrays[index] for index in indices])
            reduced.update(zip(indices, results, strict=True))
        return [reduced[index] for index in range(len(arrays))]

    def bound_to(self, number: int, lend: bool = True) -> Callable[..., list[np.ndarray]]:
        """Returns `reduce_bucket` for one bucket, taking the arrays as its arguments."""
        return lambda *arrays: self.reduce_bucket(number, arrays, lend)

    def queue_bucket(self, number: int, arrays: Sequence[np.ndarray]) -> Handle:
        """Queues `reduce_bucket`. Collective, as the operation itself; does not block.

        The arrays must stay as they are until the handle has ended.
        """
        work = functools.partial(self.reduce_bucket, number, arrays)
        return self.comm.queue(work, self.call.operation)

    @property
    def nbytes(self) -> int:
        """How much shared memory it takes, in bytes, for all ranks of the node together."""
        return sum(reduction.nbytes for reduction in (self._shared or {}).values())

    def release(self) -> None:
        """Gives its shared memory back until it is used again. All ranks must do so alike."""
        self._shared = None

    def _share_memory(self) -> dict[int, BucketReduction] | None:
        """Makes the shared memory of the buckets that use it; returns them by number.

        Collective: the ranks meet first, so that ranks that differ are told so. `None` where
        some have joined: it is made when they are back.
        """
        node = self.comm.node
        if node is None:
            return {}
        rendezvous(self.comm, self._start)
        if self.comm.absence is not None:
            exchange_among(self.comm, None)
            return None
        op = self._op_on_node()
        every = [bucket_reduction(node, bucket, op) for bucket in self.buckets]
        reductions = {n: one for n, one in enumerate(every) if self._is_for_nodes(n, one)}
        total = sum(reduction.nbytes for reduction in reductions.values())
        segment, trouble = node.segment(max(1, total), windows=self.lend)
        trouble = self.comm.first_trouble(trouble)
        if trouble is not None or segment is None:
            self.comm.explain_no_shared_memory(trouble)
            return {}
        offset = 0
        for reduction in reductions.values():
            reduction.settle(segment, offset)
            offset += reduction.nbytes
        return reductions

    def _is_for_nodes(self, number: int, reduction: BucketReduction) -> bool:
        """Whether a bucket is reduced on each node first, and then over the nodes by slices.

        Small ones are not worth two steps. Narrow floats and whole numbers must not be
        rounded, or run over, before the division.
        """
        return self.comm.is_one_node or (reduction.is_shared and self._is_wide_float(number))

    def _is_wide_float(self, number: int) -> bool:
        dtype = self.buckets[number].dtype
        return dtype.kind in "fc" and dtype.itemsize >= 4

    def _reduce_among(self, flat: np.ndarray) -> np.ndarray:
        """Reduces a bucket over the ranks that are here; uncompressed, as it is rare."""
        rows = exchange_among(self.comm, flat)
        reduce_into(flat, iter(rows), self.op)
        return scaled(flat, self._postscale(len(rows)))

    def _postscale(self, ranks: int) -> float:
        """Returns the factor for results of so many ranks."""
        share = self._size / ranks if self._divides else 1.0
        return self.call.postscale * share

    def _reduce_flat(self, number: int, flat: np.ndarray) -> None:
        """Reduces a bucket over all ranks at once, in place, in the order of the other way."""
        by_node = not self.comm.is_one_node and self._is_wide_float(number)
        nodes = self.comm.nodes if by_node else []
        op = self._op_on_node() if nodes else self.op
        divisor = 1 if op is self.op else self.comm.size
        reduce_through_mpi(self.comm.world, flat, op, self._wire(number), divisor, nodes)

    def _op_on_node(self) -> ReduceOp:
        """An average over several nodes is a sum on each; the division comes last."""
        whole = self.comm.is_one_node or self.op is not ReduceOp.AVERAGE
        return self.op if whole else ReduceOp.SUM

    def _reduce_on_node(self, number: int, reduction: BucketReduction) -> np.ndarray:
        try:
            return reduction.reduce(self._across(number))
        except SliceError as failure:
            expected = "every rank to reduce its slice of a bucket"
            remedy = "The traceback of the rank that failed says why."
            raise errors.RankError(
                errors.explain(self.comm.where(), expected, str(failure), remedy)
            ) from failure

    def _across(self, number: int) -> Finish | None:
        """Returns what reduces, in place, this rank's slice of a bucket over all nodes."""
        if self.comm.is_one_node:
            return None
        op = self._op_on_node()
        divisor = 1 if op is self.op else self.comm.size
        across, wire = self.comm.across, self._wire(number)

        def finish(part: np.ndarray, is_there: bool) -> bool:
            everywhere = np.array([is_there], np.uint8)
            # On its way beside the data, of which nothing is used where a slice is missing.
            answer = across.Iallreduce(everywhere.copy(), everywhere, self.comm.mpi.MIN)
            with spans.phase("cross-node"):
                reduce_through_mpi(across, part, op, wire, divisor)
                wait(answer)
            return bool(everywhere[0])

        return finish

    def _wire(self, number: int) -> Wire:
        """Returns how a bucket travels between nodes.

        Asked for only after the ranks have met: a compressor that does not do what it must
        is the same on all, so all raise.
        """
        if number not in self._wires:
            bucket = self.buckets[number]
            travels = not self.comm.is_one_node and bucket.nbytes > SMALL_NBYTES
            compressor = self._compression if travels else Compression.none
            self._wires[number] = wire_for(compressor, bucket.dtype, self.comm.where())
        return self._wires[number]
