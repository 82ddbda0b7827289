"""What ranks exchange in training: tensors inside a step, arrays and objects of the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _backends, _engine, runtime
from keras_dist.ops.gradient_plans import bucket_nbytes
from keras_dist.runtime.process_sets import ProcessSet


def reduce_over_ranks(
    process_set: ProcessSet | None, tensor: Any, op: _engine.ReduceOp, name: str
) -> Any:
    """Reduces a tensor, 1-D or more, inside a step; sums are differentiable. Collective."""

    def reduce(array: np.ndarray) -> np.ndarray:
        return allreduce(runtime.communicator(process_set), [array], [name], op)[0]

    return _backends.active().differentiable_host_callback(tensor, reduce, reduce, on_device=True)


def allreduce(
    comm: _engine.Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    op: _engine.ReduceOp = _engine.ReduceOp.SUM,
) -> list[Any]:
    """Returns arrays reduced over the ranks of `comm`. Collective; blocks."""
    options, nbytes = _engine.OpOptions(op), bucket_nbytes()
    return _engine.collectives.allreduce(comm, arrays, names, options, nbytes)


def allgather_object(value: Any, operation: str) -> list[Any]:
    """Returns the value of each rank of the running fit. Collective; blocks."""
    comm = runtime.fit_communicator()
    return _engine.collectives.allgather_object(comm, value, operation=operation)
