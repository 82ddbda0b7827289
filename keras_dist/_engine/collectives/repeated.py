"""The short path of a call like an earlier one: one bucket, in shared memory or with the digests.

What does not change from call to call was checked when the plan was made. What may change is
checked here, and then the call runs in the ordinary way. Ranks agree on the operation by the same
digest on both paths, so they may take different ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import reducer
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.payloads import contribution
from keras_dist._engine.collectives.rendezvous import repeated_rendezvous
from keras_dist._engine.mpi.peers import MAX_PAYLOAD_NBYTES, Payload
from keras_dist._engine.shm.bucket_reduction import BucketReduction, Full, Sliced
from keras_dist._engine.silence import silencer
from keras_dist._engine.tracing import spans

#: Reduces what fits the plan: an array, into the second argument or a new array, or a list of
#: arrays, into new ones.
Repeated = Callable[..., Any]
#: makes an array or a list visible; what it returns is passed to `_Reduce`
_Publish = Callable[[Any], Any]
_Reduce = Callable[[np.ndarray | None, Any], Any]


def repeated(plan: FusedAllreduce, ordinary: Callable[[Any], Any]) -> Repeated | None:
    """Returns the short path of a plan that has run; `None` if it has none."""
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
                if meet(payload):
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
    if not is_single:
        return _several(plan, reduction)
    return _whole(plan, reduction) if isinstance(reduction, Full) else _sliced(plan, reduction)


def _several(plan: FusedAllreduce, reduction: BucketReduction) -> tuple[_Publish, _Reduce]:
    """The ranks of a node reduce a list of arrays."""
    unpack = plan.buckets[0].unpack

    def run(_: np.ndarray | None, __: Any) -> list[np.ndarray]:
        return unpack(plan.reduce_on_node(0, reduction))

    return reduction.publish, run


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


def _sliced(plan: FusedAllreduce, reduction: BucketReduction) -> tuple[_Publish, _Reduce]:
    """Each rank of a node reduces a slice of the array."""
    shape = plan.buckets[0].slots[0].shape

    def publish(array: np.ndarray) -> np.ndarray:
        reduction.publish((array,))
        return array

    def run(out: np.ndarray | None, array: np.ndarray) -> np.ndarray:
        if out is None:
            return plan.reduce_on_node(0, reduction).reshape(shape)
        # It is written slice by slice, so it must not overlap what is still read.
        if out.flags.c_contiguous and (out is array or not np.may_share_memory(out, array)):
            plan.reduce_on_node(0, reduction, out=out.reshape(-1))
        else:
            np.copyto(out, plan.reduce_on_node(0, reduction).reshape(shape))
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
