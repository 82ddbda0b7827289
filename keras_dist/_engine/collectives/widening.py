"""Reduction of a bucket in a wider dtype between nodes.

Sums of float16, bfloat16 and float8, and averages of integers, need a wider dtype than that of the
arrays. A bucket of them that is widened is reduced between nodes as one of float32 is, in about
2 log2(nodes) messages; one that is not widened is sent in pieces among all ranks.
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
from keras_dist._engine.buckets import Bucket, Slot, aligned_array
from keras_dist._engine.tracing import spans


class Widening:
    """A bucket, and the bucket of its sums.

    Narrow floats are reduced in float32 and rounded once, at the end. Averages of integers are sums
    of 64 bits that are divided at the end; a 64-bit integer is two halves, and no sum overflows.
    """

    def __init__(self, bucket: Bucket, op: ReduceOp):
        self._narrow, dtype = bucket, accumulator(bucket.dtype, op)
        self._is_halved = needs_halves(bucket.dtype, op)
        #: whether `narrow` divides the sum; otherwise it is an average already
        self.divides = op is ReduceOp.AVERAGE and dtype.kind in "iu"
        count = bucket.count * (2 if self._is_halved else 1)
        #: the bucket of sums: one flat array
        self.bucket = Bucket(dtype, (Slot(0, (count,), 0, count),), count)
        #: how many times more bytes it has
        self.factor = self.bucket.nbytes / max(1, bucket.nbytes)

    def widen(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Packs arrays into a new array in the dtype of the sums.

        Returns:
            Array of shape (bucket.count,).
        """
        with spans.phase("copy in"), np.errstate(all="ignore"):
            flat = self._narrow.pack(arrays)
            if self._is_halved:
                return np.concatenate(halves(flat))
            return flat.astype(self.bucket.dtype)

    def narrow(self, total: np.ndarray, ranks: int) -> np.ndarray:
        """Returns the result in the dtype of the narrow bucket.

        Args:
            total: the reduced array, of shape (bucket.count,); it is not written.
        """
        result = aligned_array(self._narrow.count, self._narrow.dtype)
        with spans.phase("copy out"), np.errstate(all="ignore"):  # the caller judges overflow
            if self._is_halved:
                high, low = np.split(total, 2)
                result[...] = mean_of_halves(high, low, ranks)
            elif self.divides:
                quotient = total.copy()
                divide(quotient, ranks)
                result[...] = quotient.astype(result.dtype)
            else:
                result[...] = total.astype(result.dtype)
        return result


def widenings(buckets: Sequence[Bucket], op: ReduceOp) -> dict[int, Widening]:
    """Returns the widenings of the buckets that need a wider dtype, by number of the bucket."""
    return {
        number: Widening(bucket, op)
        for number, bucket in enumerate(buckets)
        if not is_own_accumulator(bucket.dtype, op)
    }
