"""Ranks and sizes as TensorFlow operations: evaluated when the graph runs, not when traced."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import runtime
from keras_dist.tensorflow.host_callback import collective, operation


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
