"""A large bucket of arrays in GPU memory, reduced on the host piece by piece.

While the host reduces a piece, the GPU copies the next one down and the last one up.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.host_buckets import HostBuckets
from keras_dist._engine.options import BucketOptions
from keras_dist._gpu import DeviceArray

PIECE_NBYTES = 4 * 2**20


class HostPieces:
    """The pieces of a bucket, of which each is a bucket of a plan on the host.

    Attributes:
        comm: the ranks.
    """

    def __init__(self, fused: Any, plan: BucketOptions, number: int):
        bucket, self.comm = fused.buckets[number], fused.comm
        step = max(1, PIECE_NBYTES // bucket.dtype.itemsize)
        end = bucket.slots[-1].offset + bucket.slots[-1].count
        self._bounds = [(start, min(start + step, end)) for start in range(0, end, step)]
        if len(self._bounds) < 2 or fused.options.op is ReduceOp.ADASUM:  # of whole arrays
            self._bounds = []
            return
        name = fused.call.entries[bucket.slots[0].index].name
        how = dataclasses.replace(
            plan,
            bucket_nbytes=1,
            first_nbytes=None,
            groups=(),
            overlaps=False,
            counts_updates=plan.counts_updates and number == 0,
            ranks=None,
            pooled=True,
        )
        specs = [((stop - start,), bucket.dtype) for start, stop in self._bounds]
        self._host = HostBuckets(
            fused.comm, [name] * len(specs), specs, fused.options, how, fused.calls[number]
        )

    def count(self, arrays: Sequence[DeviceArray]) -> int:
        """Returns the number of pieces of the array in which those of the bucket are joined.

        All arrays are one piece if the bucket is small, or if they are not joined.
        """
        return len(self._bounds) if self._bounds and len(arrays) == 1 else 1

    def piece(self, number: int, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Returns the arrays of a piece."""
        if self.count(arrays) == 1:
            return list(arrays)
        return [arrays[0].section(*self._bounds[number])]

    def reduce(self, piece: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces a piece. Collective: every rank; blocks."""
        return self._host.reduce_on_host(piece, arrays, lend=True)
