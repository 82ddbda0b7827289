"""reducescatter: of the sum over all ranks, each rank gets its part of the rows."""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, check_dtype, check_sum, reduce_rows, scaled
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.rows import check_rows, exchange_rows
from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried

__all__ = ["reducescatter"]


@by_name
@retried
def reducescatter(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    op: ReduceOp,
    key: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[np.ndarray]:
    """Reduces arrays and gives each rank its rows of them, in one message. Collective; blocks.

    Rows are shared out in rank order; where they do not divide, the first ranks get one more.
    On one node the bits are those of the same rows of an allreduce.

    Args:
        comm: the ranks.
        arrays: this rank's arrays; shapes and dtypes must agree over the ranks.
        names: what they are called in messages.
        op: `ReduceOp.SUM` or `ReduceOp.AVERAGE`.
        key: a name under which the ranks must meet; `None` for none.
        prescale: factor for the contributions.
        postscale: factor for the results.

    Returns:
        For each array this rank's rows, new.

    Raises:
        ArgumentError: an array has no dimension, or `op` is another one.
        ArgumentTypeError: `op` is not defined for a dtype.
        MismatchError: the ranks differ.
    """
    entries = tuple(
        Entry(name, array.shape, str(array.dtype))
        for name, array in zip(names, arrays, strict=True)
    )
    call = CollectiveSignature(
        "reducescatter", entries, op=op.value, key=key, prescale=prescale, postscale=postscale
    )
    with comm.lock:
        rendezvous(comm, call)
        # Behind the meeting: what the ranks agree on is wrong on all, so all raise.
        _check(comm, arrays, names, op)
        if not arrays:
            return []
        rows = exchange_rows(comm, [scaled(array, prescale) for array in arrays])
    return [scaled(reduce_rows(part, op), postscale) for part in rows]


def _check(
    comm: Communicator, arrays: Sequence[np.ndarray], names: Sequence[str], op: ReduceOp
) -> None:
    check_sum(op, comm.where(), "reducescatter", "Use allreduce for others; take this rank's rows.")
    for name, array in zip(names, arrays, strict=True):
        check_dtype(array.dtype, op, comm.where(), name)
        check_rows(comm, array, name, "to scatter along")
