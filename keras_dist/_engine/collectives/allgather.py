"""allgather: the arrays of all ranks, one behind the other."""

import numpy as np

from keras_dist import errors
from keras_dist._engine.agreement import Call, Entry
from keras_dist._engine.collectives.meet import meet
from keras_dist._engine.communicator import Communicator

__all__ = ["allgather"]


def allgather(
    comm: Communicator, array: np.ndarray, name: str, key: str | None = None
) -> np.ndarray:
    """Joins the arrays of all ranks along their first dimension. Collective; blocks.

    Args:
        comm: the ranks.
        array: this rank's array; its first dimension may differ from rank to rank.
        name: what it is called in messages.
        key: a name under which the ranks must meet; `None` for none.

    Returns:
        A new array: the rows of rank 0, then of rank 1, and so on.

    Raises:
        ArgumentError: the array has no dimension.
        MismatchError: the other dimensions or the dtypes differ.
    """
    if array.ndim == 0:
        raise errors.ArgumentError(
            errors.explain(
                comm.where(),
                f"{name} to have at least one dimension, to gather along",
                "a scalar",
                "Reshape it to (1,).",
            )
        )
    rest = array.shape[1:]
    entry = Entry(name, (-1, *rest), str(array.dtype))
    with comm.lock:
        meet(comm, Call("allgather", (entry,), key=key))
        payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = comm.allgather_bytes(payload)
        # Rows are told, not computed: where `rest` holds a 0, bytes cannot tell them.
        lengths = comm.allgather_bytes(np.int64(len(array)).tobytes())
    rows = sum(int(length.view(np.int64)[0]) for length in lengths)
    joined = np.concatenate(parts).view(array.dtype)
    return joined.reshape((rows, *rest))
