"""Buckets of dtypes that cannot hold sums of themselves, as buckets of a dtype that can.

Between nodes such a bucket is reduced like any other one, in about 2 log2(nodes) messages. Without
it all ranks send pieces to each other, as many messages as there are ranks.
"""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.arithmetic import (
    ReduceOp,
    accumulator,
    divide,
    halves,
    is_own_accumulator,
    mean_of_halves,
    needs_halves,
)
from keras_dist._engine.buckets import Bucket, Slot

__all__ = ["Widening", "widenings"]


class Widening:
    """A bucket, and one of the dtype of its sums.

    Floats narrower than 32 bits are reduced in float32 and rounded once, at the end. Averages of
    integers are sums of 64 bits that are divided at the end; 64-bit integers are two halves.

    Args:
        bucket: the bucket.
        op: its reduction.
    """

    def __init__(self, bucket: Bucket, op: ReduceOp):
        self._narrow = bucket
        self._is_halved = needs_halves(bucket.dtype, op)
        #: whether the sum is divided by `narrow`, and not before it
        self.divides = op is ReduceOp.AVERAGE and bucket.dtype.kind in "iu"
        count = bucket.count * (2 if self._is_halved else 1)
        #: the bucket of sums
        self.bucket = Bucket(accumulator(bucket.dtype, op), (Slot(0, (count,), 0, count),), count)

    def widen(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the arrays of the bucket as the array of the bucket of sums."""
        flat = self._narrow.pack(arrays)
        return np.concatenate(halves(flat)) if self._is_halved else flat.astype(self.bucket.dtype)

    def narrow(self, total: np.ndarray, ranks: int) -> np.ndarray:
        """Returns the fused result.

        Args:
            total: the reduced bucket of sums; it is not written.
            ranks: number of contributions.
        """
        if self._is_halved:
            high, low = np.split(total, 2)
            return mean_of_halves(high, low, ranks)
        if self.divides:
            total = total.copy()
            divide(total, ranks)
        with np.errstate(all="ignore"):  # overflow is the caller's to judge
            return total.astype(self._narrow.dtype)


def widenings(buckets: Sequence[Bucket], op: ReduceOp) -> dict[int, Widening]:
    """Returns the buckets that can be widened, by their numbers."""
    return {
        number: Widening(bucket, op)
        for number, bucket in enumerate(buckets)
        if not is_own_accumulator(bucket.dtype, op)
    }
