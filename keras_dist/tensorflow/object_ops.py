"""Python objects, and what ranks wait for: `join`, `barrier`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import errors, ops, runtime
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.host_callback import collective, operation

__all__ = [
    "allgather_object",
    "barrier",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "join",
]


@operation
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's Python object on every rank. See `keras_dist.broadcast_object`.

    Collective: every rank; `root_rank` and `name` must agree; blocks.

    Args:
        obj: any object that can be pickled; only the root's counts.
        root_rank: the rank whose object all receive. Defaults to 0.
        session: accepted; has no effect.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part. Defaults to all.
    """
    return ops.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns `broadcast_object` with these arguments, as a function of the object."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@operation
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the Python objects of all ranks, in rank order. See `keras_dist.allgather_object`.

    Collective: every rank; `name` must agree; blocks.

    Args:
        obj: any object that can be pickled.
        session: accepted; has no effect.
        name: a name, by which calls that ranks make in different orders find each other.
        process_set: the ranks that take part. Defaults to all.
    """
    return ops.allgather_object(obj, name, process_set)


@operation
def join() -> Any:
    """Takes part in the reductions of other ranks until all have joined. See `keras_dist.join`.

    Averages are those over the ranks that have not joined. Collective: every rank; blocks.

    Returns:
        The last rank to join, int32; equal on all ranks.
    """
    return collective(lambda: np.int32(ops.join()), [], [()], [tf.int32])[0]


@operation
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank has come here. Collective: every rank; blocks.

    Args:
        process_set: the ranks that take part. Defaults to all.
    """

    def wait() -> np.ndarray:
        ops.barrier(process_set)
        return np.zeros((), np.int32)

    collective(wait, [], [()], [tf.int32])


def broadcast_global_variables(root_rank: int) -> None:
    """Is of TensorFlow 1: there are no global variables any more.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        errors.explain(
            runtime.where(),
            "variables that are named, as TensorFlow 2 has no global ones",
            f"broadcast_global_variables({root_rank})",
            "Use broadcast_variables(model.variables, root_rank).",
        )
    )
