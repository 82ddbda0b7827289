"""allreduce: one value from the contributions of all ranks, the same bits on each."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.join import exchange_among
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous, telling
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.compression import Compression, Compressor
from keras_dist._engine.faults.retry import retried

__all__ = ["allreduce"]

# Of the plans of single calls so many are kept, in shared memory of so many bytes.
KEPT_PLANS = 64
KEPT_NBYTES = 256 * 2**20

_spec_of = operator.attrgetter("shape", "dtype")


@by_name
@retried
def allreduce(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    op: ReduceOp,
    bucket_nbytes: int,
    key: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Compressor = Compression.none,
) -> list[np.ndarray]:
    """Reduces a list of arrays. Collective: every rank; blocks.

    The plans of recent calls are kept: a call like an earlier one finds its memory ready.

    Args:
        comm: the ranks.
        arrays: this rank's arrays; shapes and dtypes must agree over the ranks.
        names: what they are called in messages.
        op: the reduction.
        bucket_nbytes: the size, in bytes, at which a bucket is closed.
        key: a name under which the ranks must meet; `None` for none.
        prescale: factor for the contributions.
        postscale: factor for the results.
        compression: what float32 and float64 look like between nodes.

    Returns:
        New arrays of the same shapes and dtypes, bit-equal on all ranks.

    Raises:
        MismatchError: the ranks differ.
        ArgumentTypeError: `op` is not defined for a dtype.
    """
    if not arrays:
        name = compression.name
        factors = (prescale, postscale)
        rendezvous(
            comm,
            CollectiveSignature("allreduce", (), op.value, None, key, *factors, name, spares=True),
        )
        if comm.absence is not None:
            exchange_among(comm, None)
        return []
    specs = tuple(map(_spec_of, arrays))
    factors = (prescale, postscale)
    kind = _Kind(specs, (tuple(names), op, bucket_nbytes, key, factors, compression.name))
    with comm.lock:
        fused = comm.plans.get(kind)
        if fused is None:
            with telling(comm, "allreduce", key):
                fused = FusedAllreduce(
                    comm,
                    names,
                    specs,
                    op,
                    bucket_nbytes,
                    key=key,
                    prescale=prescale,
                    postscale=postscale,
                    compression=compression,
                )
        results = fused(arrays)
        if comm.absence is not None:
            return results  # those who have joined know nothing of the plan
        # The list changes only after all ranks have agreed, so it is the same on all.
        is_new = comm.plans.pop(kind, None) is None
        comm.plans[kind] = fused
        if is_new:
            _forget_oldest(comm.plans)
    return results


class _Kind:
    """What calls of one plan have in common; hashed by a part, which for many arrays is quicker."""

    def __init__(self, specs: tuple[Any, ...], others: tuple[Any, ...]):
        self._parts = specs, others
        self._hash = hash((len(specs), specs[0], others))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self._parts == other._parts


def _forget_oldest(plans: dict[Any, FusedAllreduce]) -> None:
    nbytes = sum(plan.nbytes for plan in plans.values())
    # Never the newest, whatever its size: it is likely to be used again.
    while len(plans) > 1 and (len(plans) > KEPT_PLANS or nbytes > KEPT_NBYTES):
        nbytes -= plans.pop(next(iter(plans))).nbytes
