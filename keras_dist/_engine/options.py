"""Options of a reduction, equal on all ranks, and of the plan of a repeated one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression, Compressor
from keras_dist._engine.gradient_sets import GradientSet
from keras_dist._engine.signature import CollectiveSignature

__all__ = ["OpOptions", "PlanOptions"]


@dataclasses.dataclass(frozen=True)
class OpOptions:
    """What a reduction computes. The ranks compare the options before data moves.

    Args:
        op: the reduction.
        key: the user's name for the operation: ranks match named operations in any order.
            Defaults to `None`: operations match by their order.
        prescale: factor of the contributions.
        postscale: factor of the result.
        compression: wire format of float32 and float64 between nodes.
        gradients: in a reduction of gradients, which of them this rank brings.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    key: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = Compression.none
    gradients: GradientSet | None = None

    def signature(self, operation: str, **fields: Any) -> CollectiveSignature:
        """Returns the signature of an operation with these options.

        Args:
            operation: name of the operation.
            **fields: further fields of the signature.
        """
        return CollectiveSignature(
            operation,
            op=self.op.value,
            key=self.key,
            prescale=self.prescale,
            postscale=self.postscale,
            compression=self.compression.name,
            gradients=self.gradients,
            **fields,
        )


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """How a `FusedAllreduce` runs.

    Args:
        bucket_nbytes: size in bytes at which a bucket is closed.
        first_nbytes: the same for the first bucket, if it is smaller.
        groups: indices of arrays that share a bucket, see `plan_buckets`.
        operation: name of the operation in messages.
        remedy: what to do when the ranks differ.
        lend: whether results may lie in memory that all ranks share, see
            `keras_dist._engine.shm.zero_copy`. While results are kept in all rows, and once one has
            been written to, results are copies.
        overlaps: whether the caller should queue buckets as they become ready.
        counts_updates: whether the arrays are gradients: each call counts as an update in messages,
            and ranks exchange notices.
        divides: whether `postscale` divides by the number of ranks: while some have joined, it
            divides by the number of the others.
        ranks: returns the current ranks, where the plan may outlive its communicator: the graph of
            a step keeps its plan. Defaults to the communicator of the plan.
        pooled: whether its shared memory is that of all single calls.
    """

    bucket_nbytes: int
    first_nbytes: int | None = None
    groups: Sequence[Sequence[int]] = ()
    operation: str = "allreduce"
    remedy: str = CollectiveSignature.remedy
    lend: bool = False
    overlaps: bool = False
    counts_updates: bool = False
    divides: bool = False
    ranks: Callable[[], Any] | None = None
    pooled: bool = False
