"""allreduce: one result from the values of all ranks, with equal bits on each."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import raise_on_all, rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.options import OpOptions, PlanOptions
from keras_dist._engine.recovery.retry import retried

__all__ = ["allreduce"]

# Limits of the plans that are kept: their number, and their shared memory in bytes.
MAX_PLANS = 64
MAX_PLAN_NBYTES = 256 * 2**20

_spec_of = operator.attrgetter("shape", "dtype")


@by_name
@retried
def allreduce(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    options: OpOptions,
    bucket_nbytes: int,
) -> list[np.ndarray]:
    """Reduces a list of arrays. Collective: every rank; blocks.

    The plans of recent calls are kept: a call like an earlier one finds its memory allocated.

    Args:
        comm: the ranks.
        arrays: arrays of this rank; shapes and dtypes must agree.
        names: names of the arrays in messages.
        options: the reduction.
        bucket_nbytes: size in bytes at which a bucket is closed.

    Returns:
        New arrays of the same shapes and dtypes, bit-equal on all ranks.

    Raises:
        MismatchError: the ranks differ.
        ArgumentTypeError: the reduction is not defined for a dtype.
    """
    if not arrays:
        rendezvous(comm, options.signature("allreduce", spares=True))
        if comm.faults.joined is not None:
            exchange_among(comm, None)
        return []
    specs = tuple(map(_spec_of, arrays))
    factors = (options.prescale, options.postscale)
    others = (tuple(names), options.op, bucket_nbytes, options.key, factors)
    key = _PlanKey(specs, (*others, options.compression.name))
    with comm.lock:
        fused = comm.plans.get(key)
        if fused is None:
            with raise_on_all(comm, "allreduce", options.key):
                fused = FusedAllreduce(comm, names, specs, options, PlanOptions(bucket_nbytes))
        results = fused(arrays)
        if comm.faults.joined is not None:
            return results  # ranks that have joined do not know the plan
        # The cache changes after all ranks have agreed, so it is the same on all.
        is_new = comm.plans.pop(key, None) is None
        comm.plans[key] = fused
        if is_new:
            _drop_oldest(comm.plans)
    return results


class _PlanKey:
    """A key of plans, hashed by a part of it: faster for many arrays."""

    def __init__(self, specs: tuple[Any, ...], others: tuple[Any, ...]):
        self._parts = specs, others
        self._hash = hash((len(specs), specs[0], others))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PlanKey) and self._parts == other._parts


def _drop_oldest(plans: dict[Any, FusedAllreduce]) -> None:
    nbytes = sum(plan.nbytes for plan in plans.values())
    # The newest plan stays, whatever its size: it is likely to be used again.
    while len(plans) > 1 and (len(plans) > MAX_PLANS or nbytes > MAX_PLAN_NBYTES):
        nbytes -= plans.pop(next(iter(plans))).nbytes
