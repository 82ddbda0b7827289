"""Adasum: a sum of gradients that counts their common direction once.

Orthogonal vectors are added and parallel ones averaged, with a smooth transition. So the step does
not grow with the number of ranks whose gradients agree.

Ranks are combined in pairs, then pairs in pairs: 0 with 1, 2 with 3, then both results. Each rank
works on its rows of every vector. The ranks exchange the dot products of their rows and add them in
rank order, so all use the same factors; the rows are gathered at the end. The bytes are those of an
allreduce, for any number of ranks.
"""

from collections.abc import Sequence

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, check_dtype, scaled
from keras_dist._engine.collectives.rendezvous import by_name, rendezvous
from keras_dist._engine.collectives.rows import exchange_rows, gather_rows, row_bounds
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import OpOptions, entries_of_arrays
from keras_dist._gpu import DeviceArray


@by_name
@retried
def adasum(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    options: OpOptions,
    notices: bool = False,
) -> list[np.ndarray]:
    """Combines each array of all ranks by Adasum, on the host. Collective: every rank; blocks.

    For two ranks with vectors a and b the result is
    `a * (1 - a.b / (2 |a|^2)) + b * (1 - a.b / (2 |b|^2))`; the factor of a vector of zeros
    is 1. It is computed in float64 and rounded once (Maleki et al., "Scaling Distributed Training
    with Adaptive Summation", MLSys 2021).
    """
    call = options.signature("allreduce", entries=entries_of_arrays(names, arrays))
    with comm.lock:
        rendezvous(comm, call, notices)
        # After the rendezvous: arguments on which the ranks agree fail on all, so all raise.
        check_power_of_two(comm)
        for name, array in zip(names, arrays, strict=True):
            check_dtype(array.dtype, ReduceOp.ADASUM, comm.where(), name)
        if not arrays:
            return []
        hosted = [a.to_host() if isinstance(a, DeviceArray) else a for a in arrays]
        flat = [scaled(array, options.prescale).reshape(-1) for array in hosted]
        rows = [part.astype(np.float64) for part in exchange_rows(comm, flat)]
        # Infinities are the caller's to judge: they reach every rank alike.
        with np.errstate(all="ignore"):
            while len(rows[0]) > 1:
                rows = _combine_pairs(comm, rows)
            parts = [part[0].astype(array.dtype) for part, array in zip(rows, hosted, strict=True)]
        bounds = np.array([row_bounds(array.size, comm.size) for array in hosted])
        joined = gather_rows(comm, parts, np.diff(bounds, axis=1).T.tolist())
    return [
        scaled(whole.reshape(array.shape), options.postscale)
        for whole, array in zip(joined, arrays, strict=True)
    ]


def check_power_of_two(comm: Communicator) -> None:
    """Checks that Adasum can combine the ranks in pairs."""
    if comm.size & (comm.size - 1):
        raise errors.ArgumentError(
            comm.where(),
            "the number of ranks to be a power of two for Adasum",
            f"{comm.size} ranks",
            f"Start {2 ** (comm.size.bit_length() - 1)} or {2 ** comm.size.bit_length()} "
            "ranks, or use Average.",
        )


def _combine_pairs(comm: Communicator, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Combines every two rows of each array. Collective: every rank."""
    pairs = [(part[0::2], part[1::2]) for part in rows]
    # The sum of numpy, not of BLAS, whose order may depend on the number of threads.
    mine = np.array(
        [[(a * a).sum(axis=1), (b * b).sum(axis=1), (a * b).sum(axis=1)] for a, b in pairs]
    )
    dots = np.zeros_like(mine)
    for raw in comm.allgather_bytes(mine.tobytes()):
        dots += raw.view(np.float64).reshape(mine.shape)
    return [
        _factor(aa, ab) * a + _factor(bb, ab) * b
        for (a, b), (aa, bb, ab) in zip(pairs, dots, strict=True)
    ]


def _factor(square: np.ndarray, product: np.ndarray) -> np.ndarray:
    """Returns `1 - product / (2 square)` as a column, 1 where the vector is zero."""
    zero = square == 0
    return np.where(zero, 1.0, 1 - product / np.where(zero, 1.0, 2 * square))[:, np.newaxis]
