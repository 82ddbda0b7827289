"""The plan of a reduction that sends a part of each gradient, and the rest in later steps.

All gradients of a dtype are one bucket. Its first message has the gradients that are sent whole,
and what the compression sends first. Ranks that differ in their gradients are found there, before
anything has changed. Errors change after the last message.
"""

import dataclasses
import math
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.buckets import Bucket
from keras_dist._engine.collectives.broadcast import broadcast_object
from keras_dist._engine.collectives.device_buckets import JoinedArrays
from keras_dist._engine.collectives.exchanges import (
    Add,
    Feedback,
    Gradient,
    LargestExchange,
    LowRankExchange,
    QuantizedExchange,
    Shapes,
    is_taken,
    reduce_packed,
)
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.slices import reduce_slices
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.gradient_compression import GradientCompression, Int8, PowerSGD, TopK
from keras_dist._engine.low_rank import add_error
from keras_dist._engine.memory import ResultMemory
from keras_dist._engine.nccl.path import are_on_device, on_gpu
from keras_dist._engine.signature import BucketOptions, OpOptions


class CompressedAllreduce(FusedAllreduce):
    """Reduces a list of gradients repeatedly, compressed; plans of an optimizer share errors."""

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        options: OpOptions,
        plan: BucketOptions,
        compression: GradientCompression,
        keys: Sequence[Hashable],
        feedback: Feedback,
    ):
        plan = dataclasses.replace(plan, groups=(), lend=False, overlaps=False)
        single = dataclasses.replace(plan, bucket_nbytes=sys.maxsize, first_nbytes=None)
        super().__init__(comm, names, specs, options, single)
        self._keys, self._feedback = keys, feedback
        self._parts = []
        for number, bucket in enumerate(self.buckets):
            gradients = [
                Gradient(keys[slot.index], names[slot.index], slot.shape, bucket.dtype)
                for slot in bucket.slots
            ]
            counting = dataclasses.replace(plan, counts_updates=plan.counts_updates and not number)
            messages = _CompressedMessages(comm, options, counting, bucket.dtype)
            self._parts.append(_Part(bucket, gradients, messages, compression, feedback))
        largest = dataclasses.replace(options, op=ReduceOp.MAX, prescale=1.0, postscale=1.0)
        quiet = dataclasses.replace(single, counts_updates=False, divides=False)
        name, spec = "the number of updates", ((2,), np.dtype(np.int64))
        self._agreement = FusedAllreduce(comm, [name], [spec], largest, quiet)

    def reduce_buckets(self, parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Reduces all buckets. Collective: every rank; blocks."""
        return [self.reduce_bucket(number, list(part)) for number, part in enumerate(parts)]

    def reduce_bucket(self, number: int, arrays: Any, lend: bool = True) -> list[Any]:
        """Reduces the arrays of one bucket, or all joined to one. Collective: as that of a plan."""
        given: list[Any] = arrays.arrays if isinstance(arrays, JoinedArrays) else list(arrays)
        if are_on_device(given):
            return list(on_gpu(self.reduce_bucket(number, [a.to_host() for a in given]), given))
        bucket = self.buckets[number]
        if [array.shape for array in given] != [slot.shape for slot in bucket.slots]:
            reduced = self.reduce_bucket(number, bucket.unpack(given[0].reshape(-1)))
            return [bucket.pack(reduced).reshape(given[0].shape)]
        self._follow_ranks()
        self._agree()
        results = self._parts[number].reduce(given)
        self._feedback.step += number == len(self._parts) - 1
        return results

    def release(self) -> None:
        for part in self._parts:
            part.release()

    def _agree(self) -> None:
        """Gives ranks that are new, or were absent in an update, what is equal on all ranks."""
        feedback, place = self._feedback, (self.comm, self.comm.faults.joins)
        if feedback.agreed == place:
            return
        most, least = self._largest(feedback.step, -feedback.step)
        if most != -least:
            root, _ = self._largest(self.comm.rank if feedback.step == most else -1, 0)
            keys = feedback.keys or self._keys
            mine = [feedback.bases.get(key) for key in keys]
            found = broadcast_object(self.comm, mine, self.comm.ranks[root])
            pairs = zip(keys, found, strict=True)
            # Others are dropped: they may differ.
            feedback.bases = {key: basis for key, basis in pairs if basis is not None}
            feedback.step = most
        feedback.agreed = place

    def _largest(self, *numbers: int) -> list[int]:
        """Returns the largest of two numbers over the ranks. Collective."""
        self._agreement._follow_ranks()
        # Not `reduce_bucket`, for which an update would begin again if gradients differ.
        [found] = self._agreement.reduce_on_host(0, [np.array(numbers)], lend=False)
        return list(map(int, found))


@dataclasses.dataclass(frozen=True)
class _CompressedMessages:
    """Makes the plans of messages of one dtype."""

    comm: Communicator
    options: OpOptions
    plan: BucketOptions
    dtype: np.dtype
    made: list[FusedAllreduce] = dataclasses.field(default_factory=list)

    def first(self, shapes: Shapes) -> FusedAllreduce:
        """Returns the plan of the first message, where ranks learn which gradients there are."""
        return self._plan(shapes, self.options, self.plan)

    def other(self, shapes: Shapes) -> FusedAllreduce:
        plan = dataclasses.replace(self.plan, counts_updates=False)
        return self._plan(shapes, dataclasses.replace(self.options, gradients=None), plan)

    def whole(self, shapes: Shapes) -> FusedAllreduce:
        """Returns the plan of a reduction in several buckets, without compression."""
        specs = [(shape, self.dtype) for _, shape in shapes]
        names = [name for name, _ in shapes]
        self.made.append(FusedAllreduce(self.comm, names, specs, self.options, self.plan))
        return self.made[-1]

    def _plan(self, shapes: Shapes, options: OpOptions, plan: BucketOptions) -> FusedAllreduce:
        one = dataclasses.replace(plan, bucket_nbytes=sys.maxsize, first_nbytes=None)
        return dataclasses.replace(self, options=options, plan=one).whole(shapes)

    def rows(self, values: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reduces elements by their index. Collective: every rank; blocks."""
        op = OpOptions(self._op)
        return reduce_slices(self._ranks, values, indices, "the largest gradients", op)

    def packed(self, packed: np.ndarray, add: Add) -> np.ndarray:
        """Reduces quantized gradients. Collective: every rank; blocks."""
        return reduce_packed(self._ranks, packed, self._op is ReduceOp.AVERAGE, add)

    @property
    def _ranks(self) -> Communicator:
        return self.comm if self.plan.ranks is None else self.plan.ranks()

    @property
    def _op(self) -> ReduceOp:
        return ReduceOp.AVERAGE if self.plan.divides else self.options.op


class _Part:
    """The gradients of one bucket."""

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Gradient],
        messages: _CompressedMessages,
        compression: GradientCompression,
        feedback: Feedback,
    ):
        self._bucket, self._feedback, self._messages = bucket, feedback, messages
        self._memory = ResultMemory(bucket.count, bucket.dtype)
        every = [(gradient.name, gradient.shape) for gradient in gradients]
        self._whole = messages.whole(every)
        takes = [is_taken(compression, gradient) for gradient in gradients]
        self._sent_whole = [at for at, is_compressed in enumerate(takes) if not is_compressed]
        self._places = [at for at, is_compressed in enumerate(takes) if is_compressed]
        self._compressed = [gradients[at] for at in self._places]
        self._start = compression.start_step if self._compressed else math.inf
        self._exchange: LowRankExchange | LargestExchange | QuantizedExchange
        given = self._compressed, feedback
        if isinstance(compression, PowerSGD):
            self._exchange = LowRankExchange(*given, compression.rank, messages.other)
        elif isinstance(compression, TopK):
            self._exchange = LargestExchange(*given, compression.ratio, messages.rows)
        elif isinstance(compression, Int8):
            self._exchange = QuantizedExchange(*given, compression.bits, messages.packed)
        sent = [every[at] for at in self._sent_whole]
        flag = "whether gradients are finite", (1,)
        self._first = messages.first([*sent, *self._exchange.first, flag])

    def reduce(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces the gradients. Collective: every rank; blocks."""
        if self._feedback.step < self._start:
            return self._whole(arrays)
        results = self._bucket.unpack(self._memory.take())
        totals = [results[at].reshape(-1) for at in self._places]
        # Infinities and overflow are the caller's to judge: they reach every rank alike.
        with np.errstate(all="ignore"):
            are_finite = [
                add_error(arrays[at].reshape(-1), self._feedback.error(*gradient.place), total)
                for at, gradient, total in zip(self._places, self._compressed, totals, strict=True)
            ]
            flag = np.array([0 if all(are_finite) else np.nan], self._bucket.dtype)
            sent = [arrays[at] for at in self._sent_whole]
            *received, flags = self._first([*sent, *self._exchange.begin(totals), flag])
            for at in self._sent_whole:
                np.copyto(results[at], received.pop(0))
            if not np.isfinite(flags[0]) or not self._exchange.end(totals, received):
                for total in totals:  # the update is skipped, or fails, on all ranks
                    total.fill(np.nan)
        return results

    def release(self) -> None:
        for plan in self._messages.made:
            plan.release()
        self._memory = ResultMemory(self._bucket.count, self._bucket.dtype)
