"""Reductions of single tensors inside a training step, with a gradient."""

from typing import Any

import numpy as np

from keras_dist import _backends, _engine, runtime
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.runtime.process_sets import ProcessSet


def reduce_over_ranks(
    process_set: ProcessSet | None, tensor: Any, op: _engine.ReduceOp, name: str
) -> Any:
    """Returns a tensor reduced over the ranks, inside a training step; sums are differentiable.

    Collective: the ranks of the set, in the same order relative to other reductions.

    Args:
        tensor: the framework's tensor, at least 1-D, of the same shape on each rank.
    """

    def reduce(array: np.ndarray) -> np.ndarray:
        comm = runtime.communicator(process_set)
        options = _engine.OpOptions(op)
        return _engine.collectives.allreduce(comm, [array], [name], options, bucket_nbytes(comm))[0]

    return _backends.active().differentiable_host_callback(tensor, reduce, reduce, on_device=True)
