"""The plan of a repeated reduction: the same list of arrays, fused into buckets."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import check_dtype, check_factors
from keras_dist._engine.collectives.device_buckets import DeviceBuckets, JoinedArrays
from keras_dist._engine.collectives.host_buckets import HostBuckets
from keras_dist._engine.collectives.rendezvous import report_error
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.progress import repeat_update
from keras_dist._engine.gradient_sets import UnlikeGradients
from keras_dist._engine.nccl.path import are_on_device
from keras_dist._engine.ordering.ticket import Handle
from keras_dist._engine.signature import BucketOptions, OpOptions


class WeakPlan:
    """A function that returns a plan while it exists.

    A framework may keep a graph, with its host functions, for the life of the process; a plan holds
    shared memory. So graphs refer to a plan weakly, and it ends with its owner, such as an
    optimizer.
    """

    def __init__(self, plan: Any, operation: str, ranks: Callable[[], Communicator]):
        self._plan, self._operation, self._ranks = weakref.ref(plan), operation, ranks

    def __call__(self) -> Any:
        """Returns the plan; if garbage collection has ended it on a rank, all ranks raise."""
        plan = self._plan()
        if plan is not None:
            return plan
        comm = self._ranks()
        error = errors.BackendError(
            comm.where(),
            f"{self._operation} by the optimizer or the variables of a compiled step",
            "a step that outlives them",
            "Keep the optimizer and the model while their step is used, or trace a new step.",
        )
        report_error(comm, self._operation, error)
        raise error


class FusedAllreduce(HostBuckets):
    """Reduces the same list of arrays repeatedly, fused into buckets.

    The plan is made once, with the digests of its buckets. The ranks compare the digest of each
    bucket, so a rank with other arrays is found before data moves.
    """

    is_in_graph = False  # whether a graph of a framework refers to it, see `WeakPlan`

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        specs: Sequence[tuple[tuple[int, ...], np.dtype]],
        options: OpOptions,
        plan: BucketOptions,
    ):
        for name, (_, dtype) in zip(names, specs, strict=True):
            check_dtype(dtype, options.op, comm.where(), name)
            check_factors(dtype, options.prescale, options.postscale, comm.where(), name)
        self.overlaps = plan.overlaps
        # A weak reference: memory of a plan is freed at once, not by the garbage collector.
        self._on_device = DeviceBuckets(weakref.proxy(self), plan)
        self._unlike: Sequence[Any] | None = None  # forms that ended a pass of queued buckets
        super().__init__(comm, names, specs, options, plan)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Reduces the whole list. Collective: every rank; blocks."""
        parts = [[arrays[index] for index in indices] for indices in self.call.buckets]
        reduced: dict[int, Any] = {}
        for indices, results in zip(self.call.buckets, self.reduce_buckets(parts), strict=True):
            reduced.update(zip(indices, results, strict=True))
        return [reduced[index] for index in range(len(arrays))]

    def reduce_buckets(self, parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Reduces all buckets. Collective: every rank; blocks."""
        if parts and are_on_device(parts[0]):
            self._follow_ranks()
            return self._on_device.reduce_all(parts, self.reduce_bucket)
        results = []
        for number, (bucket, part) in enumerate(zip(self.buckets, parts, strict=True)):
            shapes = [slot.shape for slot in bucket.slots]
            if [array.shape for array in part] == shapes:
                results.append(self.reduce_bucket(number, part))
            else:
                reduced = self.reduce_bucket(number, bucket.unpack(part[0].reshape(-1)))
                results.append([bucket.pack(reduced).reshape(part[0].shape)])
        return results

    def reduce_bucket(self, number: int, arrays: Any, lend: bool = True) -> list[Any]:
        """Reduces the arrays of one bucket. Collective: in the order of `buckets`; blocks."""
        self._follow_ranks()
        try:
            if are_on_device(arrays):
                arrays = self._on_device.prepare(number, arrays)
            if isinstance(arrays, JoinedArrays):
                return self._on_device.reduce(number, arrays, lend)
            return self.reduce_on_host(number, arrays, lend)
        except UnlikeGradients:
            repeat_update(self.comm.ranks)
            raise

    def queue_bucket(self, number: int, arrays: Any, lend: bool = True) -> Handle:
        """Queues `reduce_bucket`; its arrays must not change until it has ended. Collective."""
        if are_on_device(arrays):
            arrays = self._on_device.prepare(number, arrays)
        work = functools.partial(self._reduce_queued, number, arrays, lend)
        return self.comm.order.queue(work, self.call.operation)

    def _reduce_queued(self, number: int, arrays: Sequence[Any], lend: bool) -> list[Any]:
        if number == 0:
            self._unlike = None
        if self._unlike is not None:
            raise UnlikeGradients(self._unlike)  # the ranks do not reduce this bucket
        try:
            return self.reduce_bucket(number, arrays, lend)
        except UnlikeGradients as error:
            self._unlike = error.forms
            raise

    def reduce_again(self) -> NoReturn:
        """Raises `UnlikeGradients`: gradients of this rank have changed after they were queued."""
        # The comparison that follows raises it on the other ranks as well, at the bucket where this
        # rank is missing.
        repeat_update(self.comm.ranks)
        gradients = self.options.gradients
        raise UnlikeGradients(() if gradients is None else gradients.forms)

    def weak(self) -> WeakPlan:
        self.is_in_graph = True
        comm = self.comm
        return WeakPlan(self, self.call.operation, self._plan.ranks or (lambda: comm))

    def _follow_ranks(self) -> None:
        """Moves the plan to the communicator of the current ranks."""
        comm = self.comm if self._plan.ranks is None else self._plan.ranks()
        if comm is not self.comm:
            self.comm = comm
            self._connect()
