"""allreduce: one result from the values of all ranks, with equal bits on each."""

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import raise_on_all, rendezvous
from keras_dist._engine.collectives.repeated import repeated
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.options import BucketOptions, OpOptions
from keras_dist._engine.recovery.retry import retried

MAX_CALLS = 4096  # several may have one plan: a compressor is part of a call by identity
MAX_PLANS = 1024  # that are kept; the regions are the memory of all of them

_spec_of = operator.attrgetter("shape", "dtype")


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
    """Reduces a list of arrays. Collective: every rank; blocks.

    The plans of recent calls are kept. Their memory is that of all single calls, by size.

    Args:
        arrays: arrays of this rank; shapes and dtypes must agree.
        bucket_nbytes: size in bytes at which a bucket is closed.

    Returns:
        New arrays of the same shapes and dtypes, bit-equal on all ranks.
    """
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
    """A key for calls with a list of arrays, hashed by a part of it: faster for many arrays.

    Args:
        arrays: the arrays, one or more; shapes and dtypes count.
    """

    def __init__(self, arrays: Sequence[np.ndarray], others: Hashable):
        specs = tuple(map(_spec_of, arrays))
        self._parts = specs, others
        self._hash = hash((len(specs), specs[0], others))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListKey) and self._parts == other._parts
