"""Operations without tensors: of Python objects, `join`, `barrier`, and ranks and sizes.

Ranks and sizes are evaluated when a graph runs, not when it is traced.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import errors, ops, runtime
from keras_dist.ops.descriptions import described_by
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.host_callback import collective, operation


@operation
@described_by(ops.broadcast_object)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """See `keras_dist.broadcast_object`."""
    return ops.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function of an object that calls `broadcast_object` with these arguments.

    Args:
        root_rank: as in `broadcast_object`.
        session: accepted for scripts of Horovod; has no effect.
        name: as in `allreduce`.
        process_set: as in `allreduce`.
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@operation
@described_by(ops.allgather_object)
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """See `keras_dist.allgather_object`."""
    return ops.allgather_object(obj, name, process_set)


@operation
@described_by(ops.join)
def join() -> Any:
    """The result is an int32 tensor."""
    return collective(lambda: np.int32(ops.join()), [], [()], [tf.int32])[0]


@operation
@described_by(ops.barrier)
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """See `keras_dist.barrier`."""

    def wait() -> np.ndarray:
        ops.barrier(process_set)
        return np.zeros((), np.int32)

    collective(wait, [], [()], [tf.int32])


def broadcast_global_variables(root_rank: int) -> None:
    """Raises an error: TensorFlow 2 has no global variables.

    Args:
        root_rank: as in `broadcast_variables`.

    Raises:
        RuntimeError: always.
    """
    text = errors.explain(
        runtime.where(),
        "a list of variables, since TensorFlow 2 has no global variables",
        f"broadcast_global_variables({root_rank})",
        "Use broadcast_variables(model.variables, root_rank).",
    )
    raise RuntimeError(text)


@operation
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the number of ranks, int32.

    Args:
        process_set_id: id of a process set. Defaults to 0, the set of all ranks.
        name: accepted for scripts of Horovod; has no effect.

    Raises:
        InvalidArgumentError: no process set has this id.
    """
    return _number(lambda: len(runtime.ranks_by_id(process_set_id)))


@operation
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns whether this rank is in a process set, 0 or 1, int32.

    Args:
        process_set_id: id of a process set. Defaults to 0, the set of all ranks.
        name: accepted for scripts of Horovod; has no effect.

    Raises:
        InvalidArgumentError: no process set has this id.
    """
    return _number(lambda: int(runtime.rank() in runtime.ranks_by_id(process_set_id)))


@operation
def rank_op(name: str | None = None) -> Any:
    """Returns the rank of this process, int32.

    Args:
        name: accepted for scripts of Horovod; has no effect.
    """
    return _number(runtime.rank)


@operation
def local_rank_op(name: str | None = None) -> Any:
    """Returns the rank of this process among those of its node, int32.

    Args:
        name: accepted for scripts of Horovod; has no effect.
    """
    return _number(runtime.local_rank)


@operation
def local_size_op(name: str | None = None) -> Any:
    """Returns the number of processes on this node, int32.

    Args:
        name: accepted for scripts of Horovod; has no effect.
    """
    return _number(runtime.local_size)


def _number(function: Callable[[], int]) -> Any:
    return collective(lambda: np.int32(function()), [], [()], [tf.int32])[0]
