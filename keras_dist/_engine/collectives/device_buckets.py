"""The buckets of a plan whose arrays are in GPU memory: reduced by NCCL, or staged on the host.

The arrays of a bucket are joined to one array, which is reduced by one operation. Decision 63 says
when the ranks meet.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, scaled
from keras_dist._engine.buckets import Bucket
from keras_dist._engine.collectives.host_buckets import HostBuckets
from keras_dist._engine.collectives.nccl_launch import (
    is_known,
    launch_known,
    launch_on_all,
    tell_all,
)
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.compression import Compression
from keras_dist._engine.nccl.path import NCCL, is_defined, on_gpu, uses_nccl
from keras_dist._engine.nccl.ranks import NcclRanks, nccl_of
from keras_dist._engine.recovery import retry
from keras_dist._engine.signature import BucketOptions, CollectiveSignature
from keras_dist._gpu import DeviceArray, Half, staging

PIECE_NBYTES = 4 * 2**20
R = TypeVar("R")
#: source and target of an operation, what it reads, what it writes, copies before it and after it
Taken = tuple[DeviceArray, DeviceArray, Sequence[DeviceArray], list[DeviceArray], Any]


class JoinedArrays:
    """The arrays of a bucket, joined to one array.

    The framework joins several arrays at once, or the engine copies each before its operation. A
    single array is reduced from where it lies. An error is raised by the methods, which the engine
    calls where an error of one rank is raised on all.
    """

    def __init__(self, bucket: Bucket, arrays: Sequence[DeviceArray]):
        self.arrays = list(arrays)
        self._bucket, self._joiner = bucket, arrays[0].joiner
        self._joined: DeviceArray | Exception | None = None
        if len(arrays) == 1:
            arrays[0].mark()
            arrays[0].prepare()
        elif self._joiner is not None:
            try:
                self._joined = self._join()
            except Exception as error:
                self._joined = error

    def take(self) -> Taken:
        first = self.arrays[0]
        if len(self.arrays) == 1:
            target = first.empty()
            return first, target, (), [target], ((), ())
        if self._joiner is not None:
            flat = self._flat()
            self._joined = None  # the operation writes to it: if it is repeated, they join again
            return flat, flat, (), [flat], ((), ())
        flat = first.empty((self._bucket.count,))
        targets = [array.empty() for array in self.arrays]
        itemsize = self._bucket.dtype.itemsize
        places = [flat.address + slot.offset * itemsize for slot in self._bucket.slots]
        down = [(to, a.address, a.nbytes) for to, a in zip(places, self.arrays, strict=True)]
        up = [(a.address, place, a.nbytes) for place, a in zip(places, targets, strict=True)]
        return flat, flat, self.arrays, targets, (down, up)

    def results(self, targets: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Returns as many arrays as were given, of those that an operation writes."""
        if len(targets) == len(self.arrays) or self._joiner is None:
            return list(targets)
        [flat] = targets
        parts = [self._joiner.part(flat, slot.offset, slot.shape) for slot in self._bucket.slots]
        for part in parts:
            part.completion = flat.completion
        return parts

    def sources(self) -> list[DeviceArray]:
        return self.arrays if self._joiner is None or len(self.arrays) == 1 else [self._flat()]

    def to_host(self) -> list[np.ndarray]:
        return self.unpacked([array.to_host() for array in self.sources()])

    def targets(self) -> list[DeviceArray]:
        return [array.empty() for array in self.sources()]

    def unpacked(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays of the bucket: the given ones, or views of a joined one."""
        return self._bucket.unpack(arrays[0].reshape(-1)) if len(arrays) == 1 else list(arrays)

    def packed(self, flat: np.ndarray) -> list[np.ndarray]:
        """Returns as many arrays as were given, of the fused buffer on the host."""
        if len(self.arrays) == 1:
            return [flat.reshape(self.arrays[0].shape)]
        return self._bucket.unpack(flat)

    def _flat(self) -> DeviceArray:
        if self._joined is None:
            self._joined = self._join()
        if isinstance(self._joined, Exception):
            raise self._joined
        return self._joined

    def _join(self) -> DeviceArray:
        if self._joiner is None:
            raise TypeError("arrays of a framework that joins none")
        offsets = [slot.offset for slot in self._bucket.slots]
        flat = self._joiner.join(self.arrays, offsets, self._bucket.count)
        flat.mark()
        return flat


class HostPieces:
    """The pieces of a large bucket, buckets on the host: some are copied while one is reduced."""

    def __init__(self, fused: Any, plan: BucketOptions, number: int):
        bucket, self.comm = fused.buckets[number], fused.comm
        step = max(1, PIECE_NBYTES // bucket.dtype.itemsize)
        end = bucket.slots[-1].offset + bucket.slots[-1].count
        self._bounds = [(start, min(start + step, end)) for start in range(0, end, step)]
        if len(self._bounds) < 2 or fused.options.op is ReduceOp.ADASUM:  # of whole arrays
            self._bounds = []
            return
        name = fused.call.entries[bucket.slots[0].index].name
        counts = plan.counts_updates and number == 0
        how = BucketOptions(1, counts_updates=counts, divides=plan.divides, pooled=True)
        specs = [((stop - start,), bucket.dtype) for start, stop in self._bounds]
        self._host = HostBuckets(
            fused.comm, [name] * len(specs), specs, fused.options, how, fused.calls[number]
        )

    def count(self, arrays: Sequence[DeviceArray]) -> int:
        """Returns the number of pieces: 1 if the bucket is small, or its arrays are not joined."""
        return len(self._bounds) if self._bounds and len(arrays) == 1 else 1

    def piece(self, number: int, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        if self.count(arrays) == 1:
            return list(arrays)
        return [arrays[0].section(*self._bounds[number])]

    def reduce(self, piece: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._host.reduce_on_host(piece, arrays, lend=True)


class DeviceBuckets:
    """The buckets of a plan, reduced in GPU memory."""

    def __init__(self, fused: Any, plan: BucketOptions):
        self._fused, self._plan = fused, plan
        self._calls: dict[int, CollectiveSignature] = {}  # with their digests
        self._pieces: dict[int, HostPieces] = {}
        #: pinned memory that is being filled, by bucket and piece
        self._started: dict[tuple[int, int], Half] = {}
        self._failed: tuple[errors.RankError, int] | None = None  # a step, and its next bucket

    def reduce_all(
        self, parts: Sequence[Sequence[DeviceArray]], reduce_bucket: Callable[..., list[Any]]
    ) -> list[list[DeviceArray]]:
        """Reduces all buckets, each given as in `prepare`. Collective: every rank."""
        self._started.clear()  # of a step that has failed
        given = [self.prepare(number, part) for number, part in enumerate(parts)]
        results = []
        for number, arrays in enumerate(given):
            with self._fused.comm.lock:
                for later in range(number, min(number + 2, len(given))):
                    if not self._uses_nccl(later):
                        self._start(later, 0, given[later].sources)
            results.append(reduce_bucket(number, arrays))
        return results

    def prepare(self, number: int, arrays: Sequence[DeviceArray]) -> JoinedArrays:
        """Joins the arrays of a bucket at once, before later work of their framework."""
        return JoinedArrays(self._fused.buckets[number], arrays)

    def reduce(self, number: int, given: JoinedArrays, lend: bool) -> list[DeviceArray]:
        if not self._uses_nccl(number):
            return self._through_host(number, given, lend)
        self._fused.count(number)
        kept: list[DeviceArray] = []
        work = functools.partial(self._by_nccl, number, given, kept)
        results = retry(self._fused.comm, work, lasting=lambda: list(kept) or None)
        return on_gpu(results, given.arrays)

    def _call(self, number: int) -> CollectiveSignature:
        if number not in self._calls:
            call = dataclasses.replace(self._fused.call, bucket=number, library=NCCL)
            self._calls[number] = call
        return self._calls[number]

    def _uses_nccl(self, number: int) -> bool:
        fused, comm = self._fused, self._fused.comm
        wire = fused.options.compression.name
        compresses = wire != Compression.none.name and not comm.is_one_node
        return (
            uses_nccl(comm)
            and not compresses
            and is_defined(fused.options.op, fused.buckets[number].dtype, self._factor())
        )

    def _factor(self) -> float:
        """Returns the factor of a result: that of contributions and that of their reduction."""
        return self._fused.call.prescale * self._fused.postscale(self._fused.comm.size)

    def _by_nccl(self, number: int, given: JoinedArrays, kept: list[DeviceArray]) -> list[Any]:
        comm = self._fused.comm
        with comm.lock:
            self._raise_failure(number)
            call, is_agreed = self._call(number), self._is_agreed(number)
            work = functools.partial(self._launch, number, given)
            if len(self._fused.buckets) == 1 and is_known(comm, call):
                launched = launch_known(comm, call, work, self._plan.counts_updates)
                if launched is not None:
                    return given.results(launched[0])
            elif not is_agreed:
                rendezvous(comm, call, self._plan.counts_updates)
            if comm.faults.joined is not None:
                return self._among(number, given)
            ends = not ((is_agreed or number == 0) and self._goes_on_after(number))
            try:
                targets, copies = launch_on_all(comm, call, work, ends)
            except errors.RankError as error:
                self._failed = error, number + 1
                raise
            nccl_of(comm).step = None if ends else (self, number + 1)
            if copies:
                # The contribution is still there if a rank dies before all have the result.
                for target in targets:
                    target.finish(None)
                nccl_of(comm).copy(targets, copies)
                kept[:] = given.results(copies)
            return given.results(targets)

    def _is_agreed(self, number: int) -> bool:
        """Returns whether the ranks have agreed on a bucket where they have launched the first."""
        ranks, joined = self._fused.comm.nccl, self._fused.comm.faults.joined
        return ranks is not None and joined is None and ranks.step == (self, number)

    def _goes_on_after(self, number: int) -> bool:
        """Returns whether the next bucket follows without a rendezvous."""
        fused, count = self._fused, len(self._fused.buckets)
        if number + 1 == count or fused.comm.faults.retry is not None:
            return False
        return all(map(self._uses_nccl, range(count)))

    def _raise_failure(self, number: int) -> None:
        """Raises the error of the step for its later buckets: other ranks do not come to them."""
        failed, self._failed = self._failed, None
        if failed is not None and failed[1] == number < len(self._fused.buckets):
            self._failed = failed[0], number + 1
            raise failed[0]

    def _among(self, number: int, given: JoinedArrays) -> list[Any]:
        """Reduces a bucket on the host, over the ranks that have not joined."""
        fused, bucket = self._fused, self._fused.buckets[number]
        host = [scaled(array, fused.call.prescale) for array in given.to_host()]
        return given.packed(fused.reduce_among(bucket.pack(host)))

    def _launch(
        self, number: int, given: JoinedArrays, ranks: NcclRanks
    ) -> tuple[list[DeviceArray], list[DeviceArray]]:
        """Launches a bucket; returns its results, and memory for copies if they are needed."""
        fused, dtype = self._fused, self._fused.buckets[number].dtype
        code = ranks.code_of(fused.options.op, self._factor(), dtype)
        source, target, inputs, targets, copies = given.take()
        retries = fused.comm.faults.retry is not None
        kept = [array.empty() for array in targets] if retries else []

        def group() -> None:
            if target.count:
                ranks.allreduce(source, target, code)

        outputs = dict.fromkeys((target, *targets))
        ranks.launch(self._call(number), (source, *inputs), list(outputs), group, copies)
        return targets, kept

    def _tell_all(self, work: Callable[[], R]) -> R:
        call = self._fused.call
        return tell_all(self._fused.comm, call.operation, work, call.key)

    def _start(self, number: int, piece: int, arrays: Callable[[], Sequence[DeviceArray]]) -> None:
        """Starts to copy a piece of a bucket down, if that has not been started."""

        def down() -> Half:
            return staging().down(self._pieces_of(number).piece(piece, arrays()))

        if (number, piece) not in self._started:
            self._started[number, piece] = self._tell_all(down)

    def _pieces_of(self, number: int) -> HostPieces:
        """Returns how a bucket is cut, and its reduction among the current ranks."""
        pieces = self._pieces.get(number)
        if pieces is None or pieces.comm is not self._fused.comm:
            pieces = self._pieces[number] = HostPieces(self._fused, self._plan, number)
        return pieces

    def _through_host(self, number: int, given: JoinedArrays, lend: bool) -> list[DeviceArray]:
        try:
            return self._piece_by_piece(number, given, lend)
        except Exception:
            self._started.clear()  # the next step has other arrays
            raise

    def _piece_by_piece(self, number: int, given: JoinedArrays, lend: bool) -> list[DeviceArray]:
        with self._fused.comm.lock:
            targets, pieces = self._tell_all(given.targets), self._pieces_of(number)
            count = pieces.count(targets)
            for piece in range(count):
                part = pieces.piece(piece, targets)
                for later in range(piece, min(piece + 2, count)):
                    self._start(number, later, given.sources)
                half = self._started.pop((number, piece))
                host, views = staging().host_arrays(half), half.views(part)
                if count > 1:
                    results = pieces.reduce(piece, host)
                else:
                    results = self._fused.reduce_on_host(number, given.unpacked(host), lend)
                    views = given.unpacked(views)
                staging().up(half, results, views, part)
            for target, last in zip(targets, part, strict=True):
                target.completion = last.completion
            return given.results(targets)
