"""Options of a reduction, equal on all ranks, and of the plan of a repeated one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.compression import Compression, Compressor
from keras_dist._engine.gradient_sets import GradientSet
from keras_dist._engine.signature import CollectiveSignature


@dataclasses.dataclass(frozen=True)
class OpOptions:
    """What a reduction computes. The ranks compare the options before data moves."""

    op: ReduceOp = ReduceOp.AVERAGE
    key: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = Compression.none
    gradients: GradientSet | None = None

    def signature(self, operation: str, **fields: Any) -> CollectiveSignature:
        """Returns the signature of an operation with these options."""
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
class BucketOptions:
    """How a `FusedAllreduce` runs.

    Args:
        bucket_nbytes: size in bytes at which a bucket is closed.
        first_nbytes: the same for the first bucket, if it is smaller.
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
