"""The buckets of a plan whose arrays are in GPU memory: reduced by NCCL, or staged on the host."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from keras_dist._engine.arithmetic import scaled
from keras_dist._engine.buckets import Bucket
from keras_dist._engine.collectives.nccl_launch import launch_on_all, tell_all
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.compression import Compression
from keras_dist._engine.nccl.path import NCCL, is_defined, on_gpu, uses_nccl
from keras_dist._engine.nccl.ranks import NcclRanks, nccl_of
from keras_dist._engine.options import OpOptions, PlanOptions
from keras_dist._engine.recovery.retry import retry
from keras_dist._engine.signature import CollectiveSignature
from keras_dist._gpu import DeviceArray, Staging, load_runtime

__all__ = ["DeviceBuckets"]

R = TypeVar("R")


class _Plan(Protocol):
    """What this module needs of a `FusedAllreduce`."""

    comm: Communicator
    options: OpOptions
    call: CollectiveSignature
    buckets: tuple[Bucket, ...]

    def reduce_bucket(self, number: int, arrays: Any, lend: bool = True) -> list[Any]:
        """Reduces the arrays of one bucket."""

    def reduce_among(self, flat: np.ndarray) -> np.ndarray:
        """Reduces a bucket over the ranks that have not joined."""

    def postscale(self, ranks: int) -> float:
        """Returns the factor of the results of a number of ranks."""

    def count(self, number: int) -> None:
        """Counts an update where its first bucket is reduced."""


class _Calls(dict[int, CollectiveSignature]):
    """The operations of the buckets, made when they are needed, with their digests.

    Args:
        fused: the plan.
    """

    def __init__(self, fused: _Plan):
        super().__init__()
        self._fused = fused

    def __missing__(self, number: int) -> CollectiveSignature:
        call = dataclasses.replace(self._fused.call, bucket=number, library=NCCL)
        self[number] = call
        return call


class DeviceBuckets:
    """The buckets of a plan, reduced in GPU memory.

    Args:
        fused: the plan.
        plan: how it runs.
    """

    def __init__(self, fused: _Plan, plan: PlanOptions):
        self._fused, self._plan = fused, plan
        self._calls = _Calls(fused)
        self._staging: Staging | None = None
        self._started: dict[int, Any] = {}  # halves that are being filled, by bucket

    def reduce_all(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Reduces the whole list. Collective: every rank."""
        self._started.clear()  # of a step that has failed
        reduced: dict[int, DeviceArray] = {}
        buckets = self._fused.call.buckets
        parts = [[arrays[index] for index in indices] for indices in buckets]
        for number, indices in enumerate(buckets):
            with self._fused.comm.lock:
                for later in range(number, min(number + 2, len(parts))):
                    if not self._uses_nccl(later):
                        self._start(later, parts[later])
            results = self._fused.reduce_bucket(number, parts[number])
            reduced.update(zip(indices, results, strict=True))
        return [reduced[index] for index in range(len(arrays))]

    def reduce(self, number: int, arrays: Sequence[DeviceArray], lend: bool) -> list[DeviceArray]:
        """Reduces the arrays of one bucket. Collective: every rank."""
        if not self._uses_nccl(number):
            return self._through_host(number, arrays, lend)
        self._fused.count(number)
        kept: list[DeviceArray] = []
        work = functools.partial(self._by_nccl, number, arrays, kept)
        results = retry(self._fused.comm, work, lasting=lambda: list(kept) or None)
        return on_gpu(results, arrays)

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

    def _by_nccl(
        self, number: int, arrays: Sequence[DeviceArray], kept: list[DeviceArray]
    ) -> list[Any]:
        fused, comm, bucket = self._fused, self._fused.comm, self._fused.buckets[number]
        with comm.lock:
            call = self._calls[number]
            rendezvous(comm, call, self._plan.counts_updates)
            if comm.faults.joined is not None:
                host = [scaled(array.to_host(), fused.call.prescale) for array in arrays]
                return bucket.unpack(fused.reduce_among(bucket.pack(host)))
            targets, copies = launch_on_all(
                comm, call, functools.partial(self._launch, number, arrays)
            )
            if copies:
                # The contribution is still there if a rank dies before all have the result.
                for target in targets:
                    target.finish(None)
                nccl_of(comm).copy(targets, copies)
                kept[:] = copies
            return targets

    def _launch(
        self, number: int, arrays: Sequence[DeviceArray], ranks: NcclRanks
    ) -> tuple[list[DeviceArray], list[DeviceArray]]:
        """Launches a bucket; returns its results, and memory for copies if they are needed."""
        fused, dtype = self._fused, self._fused.buckets[number].dtype
        code = ranks.code_of(fused.options.op, self._factor(), dtype)
        targets = [array.empty() for array in arrays]
        retries = fused.comm.faults.retry is not None
        copies = [array.empty() for array in arrays] if retries else []

        def group() -> None:
            for array, target in zip(arrays, targets, strict=True):
                if array.count:
                    ranks.allreduce(array, target, code)

        ranks.launch(self._calls[number], arrays, targets, group)
        return targets, copies

    def _start(self, number: int, arrays: Sequence[DeviceArray]) -> Staging:
        """Starts to copy a bucket down, if that has not been started."""
        return self._tell_all(functools.partial(self._down, number, arrays))

    def _tell_all(self, work: Callable[[], R]) -> R:
        call = self._fused.call
        return tell_all(self._fused.comm, call.operation, work, call.key)

    def _down(self, number: int, arrays: Sequence[DeviceArray]) -> Staging:
        if self._staging is None:
            runtime = load_runtime()
            if runtime is None:
                raise RuntimeError("an array in GPU memory without a runtime")
            self._staging = Staging(runtime)
        if number not in self._started:
            self._started[number] = self._staging.down(arrays)
        return self._staging

    def _through_host(
        self, number: int, arrays: Sequence[DeviceArray], lend: bool
    ) -> list[DeviceArray]:
        with self._fused.comm.lock:
            targets = self._tell_all(lambda: [array.empty() for array in arrays])
            staging = self._start(number, arrays)
            half = self._started.pop(number)
            host = staging.host_arrays(half, arrays)
            results = self._fused.reduce_bucket(number, host, lend)
            staging.up(half, results, targets)
            return targets
