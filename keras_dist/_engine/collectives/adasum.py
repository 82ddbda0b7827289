"""Adasum: a sum of gradients that does not count twice what two of them have in common.

Two vectors at right angles are added; two that are equal are averaged; between the two it
moves smoothly. So the step does not grow with the number of ranks where they agree.

The ranks are combined in pairs, then the pairs in pairs: 0 with 1, 2 with 3, then the two
results. Each rank works on its part of every vector. The dot products of the parts are
exchanged and added in rank order, so all ranks use the same factors, and the parts are put
together at the end: as many bytes as an allreduce, for any number of ranks.
"""

from collections.abc import Sequence

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, check_dtype, scaled
from keras_dist._engine.collectives.matching import by_name
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.rows import exchange_rows, gather_rows, row_bounds
from keras_dist._engine.collectives.signature import CollectiveSignature, Entry
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retried

__all__ = ["adasum", "check_power_of_two"]


@by_name
@retried
def adasum(
    comm: Communicator,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
    key: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    tells: bool = False,
) -> list[np.ndarray]:
    """Combines arrays of all ranks by Adasum, each by itself. Collective: every rank; blocks.

    For two ranks with vectors a and b it is
    `a * (1 - a.b / (2 |a|^2)) + b * (1 - a.b / (2 |b|^2))`; the factor of a vector of zeros
    is 1. Everything is computed in float64 and rounded once.

    Args:
        comm: the ranks, a power of two.
        arrays: this rank's arrays of floats; shapes and dtypes must agree over the ranks.
        names: what they are called in messages.
        key: a name under which the ranks must meet; `None` for none.
        prescale: factor for the contributions.
        postscale: factor for the results.
        tells: see `rendezvous`.

    Returns:
        New arrays of the same shapes and dtypes, bit-equal on all ranks.

    Raises:
        ArgumentError: the number of ranks is not a power of two.
        ArgumentTypeError: an array does not hold floats.
        MismatchError: the ranks differ.

    Reference:
        Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
    """
    entries = tuple(
        Entry(name, array.shape, str(array.dtype))
        for name, array in zip(names, arrays, strict=True)
    )
    op = ReduceOp.ADASUM.value
    call = CollectiveSignature(
        "allreduce", entries, op=op, key=key, prescale=prescale, postscale=postscale
    )
    with comm.lock:
        rendezvous(comm, call, tells)
        # Behind the meeting: what the ranks agree on is wrong on all, so all raise.
        check_power_of_two(comm)
        for name, array in zip(names, arrays, strict=True):
            check_dtype(array.dtype, ReduceOp.ADASUM, comm.where(), name)
        if not arrays:
            return []
        flat = [scaled(array, prescale).reshape(-1) for array in arrays]
        rows = [part.astype(np.float64) for part in exchange_rows(comm, flat)]
        # As the caller judges infinities of a sum, so here: they reach every rank alike.
        with np.errstate(all="ignore"):
            while len(rows[0]) > 1:
                rows = _combine_pairs(comm, rows)
            parts = [part[0].astype(array.dtype) for part, array in zip(rows, arrays, strict=True)]
        bounds = np.array([row_bounds(array.size, comm.size) for array in arrays])
        joined = gather_rows(comm, parts, np.diff(bounds, axis=1).T.tolist())
    return [
        scaled(whole.reshape(array.shape), postscale)
        for whole, array in zip(joined, arrays, strict=True)
    ]


def check_power_of_two(comm: Communicator) -> None:
    """Checks that the number of ranks is one that Adasum can combine in pairs.

    Raises:
        ArgumentError: it is not a power of two.
    """
    if comm.size & (comm.size - 1):
        raise errors.ArgumentError(
            errors.explain(
                comm.where(),
                "the number of ranks to be a power of two for Adasum",
                f"{comm.size} ranks",
                f"Take {2 ** (comm.size.bit_length() - 1)} or {2 ** comm.size.bit_length()} "
                "ranks, or use Average.",
            )
        )


def _combine_pairs(comm: Communicator, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Makes one row of every two, in each array. Collective: every rank."""
    pairs = [(part[0::2], part[1::2]) for part in rows]
    # numpy's own sum, not BLAS, whose order may depend on the number of threads.
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
