"""Collectives on Python objects, which are sent pickled."""

from typing import Any

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.ops.arguments import native
from keras_dist.ops.shared_errors import raises_on_all
from keras_dist.runtime.process_sets import ProcessSet


@raises_on_all
def broadcast_object(
    value: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns the Python object of the root rank on every rank. Objects are sent pickled.

    Collective: every rank; `root_rank` and `name` must agree; blocks.

    Args:
        value: any object that can be pickled; ignored on ranks other than the root. Defaults to
            `None`.
        root_rank: rank of the job that sends its object, also in a process set. Defaults to 0.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        The root's own object on the root, a copy on the other ranks. The byte order of an array is
        that of this machine.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: `root_rank` is not a rank of the process set, or its object cannot be
            pickled; raised on every rank.
    """
    if isinstance(value, np.ndarray):
        value = native(value)  # as numpy reads it on the other ranks
    return _engine.collectives.broadcast_object(
        runtime.communicator(process_set), value, root_rank, name
    )


@raises_on_all
def allgather_object(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Returns the Python objects of all ranks, in rank order. Objects are sent pickled.

    Collective: every rank; `name` must agree; blocks.

    Args:
        value: any object that can be pickled.
        name: as in `allreduce`.
        process_set: as in `allreduce`.

    Returns:
        List of one object a rank.

    Raises:
        MismatchError: the arguments of the ranks differ; raised on every rank.
        ArgumentError: the object of a rank cannot be pickled; raised on every rank.
    """
    return _engine.collectives.allgather_object(runtime.communicator(process_set), value, name)
