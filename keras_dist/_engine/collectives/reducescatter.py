"""reducescatter: the sum over all ranks, scattered by rows."""

from collections.abc import Sequence

import numpy as np

from keras_dist._engine.arithmetic import check_dtype, check_sum, reduce_rows, scaled
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.rows import check_rows, exchange_rows
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.options import OpOptions
from keras_dist._engine.recovery.retry import retried
from keras_dist._engine.signature import entries_of_arrays


@by_name
@retried
def reducescatter(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    options: OpOptions,
) -> list[np.ndarray]:
    """Reduces arrays and scatters their rows, in one message. Collective: every rank; blocks.

    Rows are distributed in rank order; where they do not divide, the first ranks get one more.
    On one node the bits are those of the same rows of an allreduce.

    Args:
        arrays: arrays of this rank; shapes and dtypes must agree.
    """
    call = options.signature("reducescatter", entries=entries_of_arrays(names, arrays))
    with comm.lock:
        rendezvous(comm, call)
        # After the rendezvous: arguments on which the ranks agree fail on all, so all raise.
        _check(comm, arrays, names, options)
        if not arrays:
            return []
        rows = exchange_rows(comm, [scaled(array, options.prescale) for array in arrays])
    return [scaled(reduce_rows(part, options.op), options.postscale) for part in rows]


def _check(
    comm: Communicator, arrays: Sequence[np.ndarray], names: Sequence[str], options: OpOptions
) -> None:
    remedy = "Use allreduce for others, and slice the rows of this rank."
    check_sum(options.op, comm.where(), "reducescatter", remedy)
    for name, array in zip(names, arrays, strict=True):
        check_dtype(array.dtype, options.op, comm.where(), name)
        check_rows(comm, array, name, "to scatter along")
