"""The part of a bucket's reduction that crosses nodes, through MPI."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist._engine.arithmetic import (
    ReduceOp,
    accumulator,
    divide,
    halves,
    is_own_accumulator,
    mean_of_halves,
    needs_halves,
)
from keras_dist._engine.buckets import Bucket, Slot, aligned_array, slice_bounds
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.compression import Compression, Compressor, Wire
from keras_dist._engine.mpi.peers import MAX_PAYLOAD_NBYTES, Legs, Payload
from keras_dist._engine.mpi.reduction import SMALL_NBYTES, Combination, reduce_through_mpi
from keras_dist._engine.mpi.transfer import wait
from keras_dist._engine.shm.bucket_reduction import BucketReduction, Finish, Full, Sliced
from keras_dist._engine.tracing import spans

WHOLE_NBYTES = 64 * 1024  # of several ranks on each node: slices of larger buckets save bytes


class Widening:
    """A bucket, and the bucket of its sums, in a wider dtype.

    A bucket that is widened is reduced between nodes as one of float32 is, in about 2 log2(nodes)
    messages; one that is not is sent in pieces among all ranks.

    Narrow floats are reduced in float32 and rounded once, at the end. Averages of integers are sums
    of 64 bits that are divided at the end; a 64-bit integer is two halves, and no sum overflows.
    """

    def __init__(self, bucket: Bucket, op: ReduceOp):
        self._narrow, dtype = bucket, accumulator(bucket.dtype, op)
        self._is_halved = needs_halves(bucket.dtype, op)
        #: whether `narrow` divides the sum; otherwise it is an average already
        self.divides = op is ReduceOp.AVERAGE and dtype.kind in "iu"
        count = bucket.count * (2 if self._is_halved else 1)
        #: the bucket of sums: one flat array
        self.bucket = Bucket(dtype, (Slot(0, (count,), 0, count),), count)
        #: how many times more bytes it has
        self.factor = self.bucket.nbytes / max(1, bucket.nbytes)

    def widen(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Packs arrays into a new flat array in the dtype of the sums."""
        with spans.phase("copy in"), np.errstate(all="ignore"):
            flat = self._narrow.pack(arrays)
            if self._is_halved:
                return np.concatenate(halves(flat))
            return flat.astype(self.bucket.dtype)

    def narrow(self, total: np.ndarray, ranks: int) -> np.ndarray:
        result = aligned_array(self._narrow.count, self._narrow.dtype)
        with spans.phase("copy out"), np.errstate(all="ignore"):  # the caller judges overflow
            if self._is_halved:
                high, low = np.split(total, 2)
                result[...] = mean_of_halves(high, low, ranks)
            elif self.divides:
                quotient = total.copy()
                divide(quotient, ranks)
                result[...] = quotient.astype(result.dtype)
            else:
                result[...] = total.astype(result.dtype)
        return result


class CrossNodeReduction:
    """Reduces buckets between the nodes of a communicator."""

    def __init__(
        self, comm: Communicator, buckets: Sequence[Bucket], op: ReduceOp, compression: Compressor
    ):
        self._comm, self._op = comm, op
        self._compression = compression
        # Extremes of MPICH and Open MPI may lose a NaN, and differ between ranks.
        by_library = comm.reduction == "library" and op not in (ReduceOp.MIN, ReduceOp.MAX)
        self._library = comm.mpi if by_library else None
        self._wires: dict[int, Wire] = {}
        self._legs: dict[int, Legs | None] = {}
        #: the reduction on each node: an average over several nodes is a sum, divided at the end
        self.op_on_node = op
        if op is ReduceOp.AVERAGE and not comm.is_one_node:
            self.op_on_node = ReduceOp.SUM
        #: what is reduced: the bucket of sums in place of one that is widened
        self.buckets = list(buckets)
        #: by number, the buckets that are widened, and so travel with the digests
        self.widened: dict[int, Widening] = {}
        for number, narrow in enumerate(() if comm.is_one_node else buckets):
            if is_own_accumulator(narrow.dtype, op):
                continue
            self.widened[number] = widening = Widening(narrow, op)
            self.buckets[number] = widening.bucket
            # Of larger slices the bytes count: as pieces, a node sends those of all its ranks.
            saves = widening.factor <= comm.topology.slices
            saves = saves or self._largest_slice(number) <= MAX_PAYLOAD_NBYTES
            if not (saves and self.travels(number)):
                self.buckets[number] = narrow
                del self.widened[number]

    def reduces_on_node(self, number: int) -> bool:
        """Returns whether a large bucket is reduced on each node first."""
        if self._comm.is_one_node or number in self.widened:
            return True
        # Else the sum of a node would be rounded (narrow floats) or overflow (integer averages).
        return is_own_accumulator(self.buckets[number].dtype, self._op)

    def travels(self, number: int) -> bool:
        """Returns whether a bucket crosses nodes in the messages with the digests."""
        nbytes, dtype = self.buckets[number].nbytes, self.buckets[number].dtype
        compresses = self._compression is not Compression.none and nbytes > SMALL_NBYTES
        compresses = compresses and dtype.kind == "f" and number not in self.widened
        if compresses or not (self._comm.digests.carries and self.reduces_on_node(number)):
            return False
        if self._library is not None and nbytes > MAX_PAYLOAD_NBYTES and dtype.kind in "fc":
            return False
        limit = max(self._comm.halving_nbytes, MAX_PAYLOAD_NBYTES)
        return self._largest_slice(number) <= limit

    @property
    def whole_nbytes(self) -> int | None:
        """Up to which size each rank of a node reduces a bucket whole; `None`: as on one node."""
        if self._comm.is_one_node:
            return None
        if not self._comm.topology.is_homogeneous:
            return -1
        return WHOLE_NBYTES if self._compression is Compression.none else SMALL_NBYTES

    def payload(
        self,
        number: int,
        load: Callable[[Payload], np.ndarray | None],
        result: np.ndarray,
        count: int | None = None,
    ) -> Payload:
        if number not in self._legs:
            bucket, comm = self.buckets[number], self._comm
            legs = None
            if comm.node is None or comm.topology.has_slice:
                legs = comm.digests.peers.legs(
                    bucket.count if count is None else count, bucket.dtype
                )
            self._legs[number] = legs
        op, divisor = self.op_on_node, self._divisor(number)
        return Payload(self._legs[number], op, divisor, load, result, is_slice=count is not None)

    def _largest_slice(self, number: int) -> int:
        """Returns the size in bytes of the largest part that a rank exchanges."""
        bucket, comm = self.buckets[number], self._comm
        if comm.node is None or bucket.nbytes <= (self.whole_nbytes or 0):
            return bucket.nbytes
        bounds = slice_bounds(bucket.count, comm.topology.slices, bucket.dtype.itemsize)
        longest = max(high - low for low, high in itertools.pairwise(bounds))
        return longest * bucket.dtype.itemsize

    def reduce(self, number: int, source: np.ndarray, target: np.ndarray) -> None:
        """Reduces a bucket by MPI, in the order of nodes: with equal bits. Collective; blocks."""
        sums, wire = Combination(self._op), self._wire(number, source.dtype)
        is_own = is_own_accumulator(source.dtype, self._op)
        # Averages of integers are reduced over all ranks at once: the sum of a node may overflow.
        by_node = is_own or accumulator(source.dtype, self._op).kind not in "iu"
        if by_node and not self._comm.is_one_node:
            nodes = self._comm.topology.nodes
            sums = Combination(self.op_on_node, self._divisor(number), nodes)
        are_slow, library = self._comm.links_are_slow, self._library
        reduce_through_mpi(self._comm.world, source, target, sums, wire, are_slow, library)

    def finish(self, number: int) -> Finish | None:
        """Returns a function that reduces this rank's slice over nodes, in place, if it has one."""
        if self._comm.is_one_node:
            return None
        topology, wire = self._comm.topology, self._wire(number, self.buckets[number].dtype)
        if not topology.has_slice:
            return None
        across, nodes = topology.across, [[node] for node in range(topology.cross_size)]
        sums = Combination(self.op_on_node, self._divisor(number), nodes)

        def finish(part: np.ndarray, is_ready: bool) -> bool:
            everywhere = np.array([is_ready], np.uint8)
            # Sent beside the data, none of which is used if a slice is missing.
            answer = across.Iallreduce(everywhere.copy(), everywhere, self._comm.mpi.MIN)
            with spans.phase("cross-node"):
                are_slow, library = self._comm.links_are_slow, self._library
                reduce_through_mpi(across, part, part, sums, wire, are_slow, library)
                wait(answer)
            return bool(everywhere[0])

        return finish

    def _divisor(self, number: int) -> int:
        is_divided_later = number in self.widened and self.widened[number].divides
        return 1 if is_divided_later or self.op_on_node is self._op else self._comm.size

    def _wire(self, number: int, dtype: np.dtype) -> Wire:
        """Returns the wire; after the rendezvous, so a faulty compressor raises on all ranks."""
        if number not in self._wires:
            bucket = self.buckets[number]
            compressed = not self._comm.is_one_node and bucket.nbytes > SMALL_NBYTES
            compressor = self._compression if compressed else Compression.none
            self._wires[number] = Wire(compressor, dtype, self._comm.where())
        return self._wires[number]


def contribution(
    bucket: Bucket,
    arrays: Sequence[np.ndarray],
    reduction: BucketReduction | None,
    result: np.ndarray,
) -> np.ndarray:
    """Returns the whole sum of this node, in `result` or where it lies."""
    if isinstance(reduction, Full):
        reduction.reduce_published(result)
    elif len(arrays) == 1 and arrays[0].flags.c_contiguous:
        return arrays[0].reshape(-1)
    else:
        bucket.pack_into(result, arrays)
    return result


def slice_payload(cross_node: CrossNodeReduction, number: int, reduction: Sliced) -> Payload:
    """Returns the slice of this rank as a payload."""

    # It takes the payload: a reference to it would be a cycle.
    def load(payload: Payload) -> np.ndarray | None:
        payload.failure = payload.partial = None
        try:
            payload.partial, payload.result = reduction.reduce_published()
        except Exception as error:  # ranks of all nodes wait for this slice
            payload.failure = error
        return payload.partial

    return cross_node.payload(number, load, np.empty(0), reduction.count)
