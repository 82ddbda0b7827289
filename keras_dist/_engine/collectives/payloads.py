"""What a rank brings to the reduction of a bucket that crosses nodes with the digests."""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.buckets import Bucket
from keras_dist._engine.collectives.cross_node import CrossNodeReduction
from keras_dist._engine.mpi.peers import Payload
from keras_dist._engine.shm.bucket_reduction import BucketReduction, Full, Sliced


def contribution(
    bucket: Bucket,
    arrays: Sequence[np.ndarray],
    reduction: BucketReduction | None,
    result: np.ndarray,
) -> np.ndarray:
    """Returns the whole sum of this node, in `result` or where it lies."""
    if isinstance(reduction, Full):
        reduction.reduce_published(result)
    elif len(arrays) == 1 and arrays[0].flags.c_contiguous:
        return arrays[0].reshape(-1)
    else:
        bucket.pack_into(result, arrays)
    return result


def slice_payload(cross_node: CrossNodeReduction, number: int, reduction: Sliced) -> Payload:
    """Returns the slice of this rank as a payload."""

    # It takes the payload: a reference to it would be a cycle.
    def load(payload: Payload) -> np.ndarray | None:
        payload.failure = payload.partial = None
        try:
            payload.partial, payload.result = reduction.reduce_published()
        except Exception as error:  # ranks of all nodes wait for this slice
            payload.failure = error
        return payload.partial

    return cross_node.payload(number, load, np.empty(0), reduction.count)
