"""allreduce: one result from the values of all ranks, with equal bits on each."""

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, reducer, silencer
from keras_dist._engine.collectives.cross_node import contribution
from keras_dist._engine.collectives.differences import RepeatRendezvous
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.rendezvous import (
    by_name,
    raise_on_all,
    rendezvous,
    repeated_rendezvous,
)
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.peers import MAX_PAYLOAD_NBYTES, Payload
from keras_dist._engine.recovery import retried
from keras_dist._engine.shm.bucket_reduction import BucketReduction, Full, Sliced
from keras_dist._engine.signature import BucketOptions, OpOptions
from keras_dist._engine.tracing import spans

#: Reduces what fits the plan: an array, into the second argument or a new array, or a list of
#: arrays, into new ones.
Repeated = Callable[..., Any]
#: makes an array or a list visible; what it returns is passed to `_Reduce`
_Publish = Callable[[Any], Any]
_Reduce = Callable[[np.ndarray | None, Any], Any]
MAX_CALLS = 4096  # several may have one plan: a compressor is part of a call by identity
MAX_PLANS = 1024  # that are kept; the regions are the memory of all of them

_spec_of = operator.attrgetter("shape", "dtype")


def repeated(plan: FusedAllreduce, ordinary: Callable[[Any], Any]) -> Repeated | None:
    """Returns the short path of a plan that has run; `None` if it has none."""
    # What does not change from call to call was checked when the plan was made. Ranks agree on the
    # operation by the same digest on both paths, so they may take different ones.
    if len(plan.buckets) != 1 or plan.widening(0) is not None:
        return None
    comm, reduction = plan.comm, plan.memory.ready_reduction(0)
    scales = (plan.options.prescale, plan.options.postscale) != (1.0, 1.0)
    form = None if scales or plan.options.key is not None else _form(plan, reduction)
    if form is None:
        return None
    publish, reduce = form
    pool, is_single = comm.regions, len(plan.buckets[0].slots) == 1
    version = pool.version  # with another region, the call may need to agree on memory first
    order, faults, meet = comm.order, comm.faults, repeated_rendezvous(comm, plan.calls[0])

    def run(given: Any, out: np.ndarray | None = None) -> Any:
        with order.lock:
            if (
                # What may change from call to call.
                spans.recorder is not None
                or pool.version != version
                or faults.joined is not None
                or faults.retry is not None
                or order.refused
                or (comm.nccl is not None and comm.nccl.launched)
            ):
                result = ordinary(given)
            else:
                published = publish(given)
                payload = published if isinstance(published, Payload) else None
                try:
                    same = meet(payload)
                except RepeatRendezvous:
                    result = ordinary(given)
                else:
                    if same:
                        return reduce(out, published)
                    arrays = (given,) if is_single else given
                    results = plan.finish(0, arrays, True, reduction, payload)
                    result = results[0] if is_single else results
            if out is None:
                return result
            np.copyto(out, result)
            return out

    return run


def _form(
    plan: FusedAllreduce, reduction: BucketReduction | None
) -> tuple[_Publish, _Reduce] | None:
    """Returns how a call publishes before the rendezvous, and reduces after it."""
    is_single = len(plan.buckets[0].slots) == 1
    if not plan.comm.is_one_node:
        payload = plan.payload(0, (), reduction) if is_single else None
        return None if payload is None else _with_digests(plan, reduction, payload)
    if reduction is None:
        return None
    if is_single and isinstance(reduction, Full):
        return _whole(plan, reduction)
    return _on_node(plan, reduction)


def _whole(plan: FusedAllreduce, reduction: Full) -> tuple[_Publish, _Reduce]:
    """Each rank of a node reduces the whole array."""
    region, [slot], dtype = reduction.region, plan.buckets[0].slots, plan.buckets[0].dtype
    shape, reduce = slot.shape, functools.partial(silencer(), reducer(dtype, plan.options.op))
    flat = shape or (1,)  # numpy makes scalars of arrays without a dimension
    rows = [[row.reshape(flat) for row in turn] for turn in reduction.contributions]
    mine = [row.reshape(flat) for row in reduction.mine]

    def publish(array: np.ndarray) -> None:
        np.copyto(mine[region.turn ^ 1], array)

    def run(out: np.ndarray | None, _: Any) -> np.ndarray:
        result = np.empty(shape, dtype) if out is None else out
        region.turn = turn = region.turn ^ 1
        reduce(result if shape else result.reshape(1), rows[turn])
        return result

    return publish, run


def _on_node(plan: FusedAllreduce, reduction: BucketReduction) -> tuple[_Publish, _Reduce]:
    """The ranks of a node reduce a list of arrays, or each a slice of a large array."""
    unpack, is_single = plan.buckets[0].unpack, len(plan.buckets[0].slots) == 1

    def publish(given: Any) -> Any:
        reduction.publish((given,) if is_single else given)
        return given

    def run(out: np.ndarray | None, given: Any) -> Any:
        if out is None or not is_single:
            results = unpack(plan.reduce_on_node(0, reduction))
            return results[0] if is_single else results
        # It is written slice by slice, so it must not overlap what is still read.
        if out.flags.c_contiguous and (out is given or not np.may_share_memory(out, given)):
            plan.reduce_on_node(0, reduction, out=out.reshape(-1))
        else:
            np.copyto(out, plan.reduce_on_node(0, reduction).reshape(out.shape))
        return out

    return publish, run


def _with_digests(
    plan: FusedAllreduce, reduction: BucketReduction | None, payload: Payload
) -> tuple[_Publish, _Reduce]:
    """The array crosses nodes in the messages of the rendezvous."""
    bucket = plan.buckets[0]
    shape, count, dtype = bucket.slots[0].shape, bucket.count, bucket.dtype
    is_small, is_sliced = bucket.nbytes <= MAX_PAYLOAD_NBYTES, isinstance(reduction, Sliced)
    arrays: tuple[np.ndarray, ...] = ()
    nothing = np.empty(0, dtype)

    def load(payload: Payload) -> np.ndarray:
        return contribution(bucket, arrays, reduction, payload.result)

    if not is_sliced:
        payload.load, payload.result = load, nothing

    def publish(array: np.ndarray) -> Payload:
        nonlocal arrays
        arrays = (array,)
        if reduction is not None:
            reduction.publish(arrays)
        if not is_sliced:
            payload.result = np.empty(count, dtype) if is_small else plan.memory.result(0)
        return payload

    def run(out: np.ndarray | None, _: Any) -> np.ndarray:
        nonlocal arrays
        result = plan.take(0, payload, reduction).reshape(shape)
        arrays, payload.result = (), nothing  # the caller's alone, except after an error
        if out is None:
            return result
        np.copyto(out, result)
        return out

    return publish, run


@by_name
@retried
def allreduce(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    options: OpOptions,
    bucket_nbytes: int,
    repeat: Hashable | None = None,
) -> list[np.ndarray]:
    """Reduces a list of arrays by a plan, which is kept for calls like it. Collective; blocks."""
    if not arrays:
        rendezvous(comm, options.signature("allreduce", spares=True))
        if comm.faults.joined is not None:
            exchange_among(comm, None)
        return []
    with comm.lock:
        plan = _plan_of(comm, arrays, names, options, bucket_nbytes)
        results = plan(arrays)
        if repeat is not None:
            _keep_short_path(plan, names, bucket_nbytes, repeat)
    return results


def _keep_short_path(
    plan: FusedAllreduce, names: Sequence[str], bucket_nbytes: int, repeat: Hashable
) -> None:
    comm, options = plan.comm, plan.options
    if options.op is ReduceOp.ADASUM or comm.size == 1 or comm.faults.retry is not None:
        return

    def ordinary(given: Any) -> Any:
        if len(names) == 1:
            return allreduce(comm, [given], names, options, bucket_nbytes)[0]
        return allreduce(comm, given, names, options, bucket_nbytes)

    run = repeated(plan, ordinary)
    if run is not None:
        if len(comm.fast_calls) >= MAX_CALLS:
            comm.fast_calls.clear()
        comm.fast_calls[repeat] = run


def _plan_of(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    options: OpOptions,
    bucket_nbytes: int,
) -> FusedAllreduce:
    """Returns the plan of an earlier call like this one, or a new one."""
    factors = (options.prescale, options.postscale)
    others = (tuple(names), options.op, bucket_nbytes, options.key, factors)
    key = ListKey(arrays, (*others, options.compression.name))
    plan: FusedAllreduce | None = comm.plans.get(key)
    if plan is None:
        with raise_on_all(comm, "allreduce", options.key):
            pooled = BucketOptions(bucket_nbytes, lend=True, pooled=True)
            plan = FusedAllreduce(comm, names, list(map(_spec_of, arrays)), options, pooled)
        while len(comm.plans) >= MAX_PLANS:
            comm.plans.pop(next(iter(comm.plans)), None)
            comm.fast_calls.clear()
        comm.plans[key] = plan
    return plan


class ListKey:
    """A key for calls with a list of arrays, hashed by a part of it: faster for many arrays."""

    def __init__(self, arrays: Sequence[np.ndarray], others: Hashable):
        specs = tuple(map(_spec_of, arrays))
        self._parts = specs, others
        self._hash = hash((len(specs), specs[0], others))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListKey) and self._parts == other._parts
