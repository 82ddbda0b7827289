"""A flat array reduced between ranks through MPI, piece after piece.

Each rank reduces its slice of a piece, in rank order, and the slices are shared. While a
piece is reduced the next one is on its way. Who reduces an element never shows in its bits:
where numbers are compressed on their way, every contribution is, and every rank, also the one
that reduced, takes the result as it travelled.

Knows MPI's communicators by what they can do.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, divide, reduce_into
from keras_dist._engine.compression import Wire
from keras_dist._engine.mpi import transfer
from keras_dist._engine.mpi.transfer import as_bytes, wait
from keras_dist._engine.shm.wait import blocked

__all__ = ["SMALL_NBYTES", "reduce_through_mpi"]

# Up to here every rank reduces everything itself: one message in place of two.
SMALL_NBYTES = 32 * 1024
# So much of a piece is reduced by each rank.
PIECE_NBYTES = 2**20


def reduce_through_mpi(
    world: Any,
    flat: np.ndarray,
    op: ReduceOp,
    wire: Wire,
    divisor: int = 1,
    nodes: Sequence[Sequence[int]] = (),
) -> None:
    """Reduces a flat array over ranks, in place. Collective: every rank of `world`; blocks.

    Args:
        world: the MPI communicator of the ranks.
        flat: this rank's contribution, contiguous; the result when this returns.
        op: the reduction.
        wire: how the numbers travel.
        divisor: what the result is divided by at the end.
        nodes: the ranks of each node, to be reduced by themselves first: the order in which
            larger arrays are reduced, so that sizes do not show in the bits. None by default.
    """
    size = world.Get_size()
    width = max(flat.itemsize, wire.dtype.itemsize)
    limit = transfer.MAX_NBYTES // width
    if flat.nbytes <= SMALL_NBYTES and flat.size * size <= limit:
        rows = np.empty((size, flat.size), wire.dtype)
        with blocked:
            world.Allgather(as_bytes(wire.pack(flat)), as_bytes(rows))
        _reduce(flat, rows, op, wire, divisor, nodes)
        flat[...] = wire.unpack(wire.pack(flat))
        return
    # A rank receives as many slices as there are ranks, and slices may be of uneven length.
    step = max(1, min(PIECE_NBYTES * size // flat.itemsize, limit // size * size))
    pieces = [
        _Piece(world, flat[low : low + step], op, wire, divisor, nodes)
        for low in range(0, flat.size, step)
    ]
    pieces[0].send()
    for piece, following in itertools.zip_longest(pieces, pieces[1:]):
        if following is not None:
            following.send()
        piece.reduce()
    for piece in pieces:
        piece.finish()


class _Piece:
    """A piece on its way: `send`, `reduce`, `finish`, each collective."""

    def __init__(
        self,
        world: Any,
        part: np.ndarray,
        op: ReduceOp,
        wire: Wire,
        divisor: int,
        nodes: Sequence[Sequence[int]],
    ):
        self._world, self._part = world, part
        self._op, self._wire, self._divisor, self._nodes = op, wire, divisor, nodes
        size, rank = world.Get_size(), world.Get_rank()
        counts = np.diff(np.arange(size + 1) * part.size // size)
        self._mine = int(counts[rank])
        self._counts = counts * wire.dtype.itemsize

    def send(self) -> None:
        """Sends every rank its slice; returns at once."""
        size = len(self._counts)
        self._rows = np.empty((size, self._mine), self._wire.dtype)
        received = np.full(size, self._rows[0].nbytes)
        self._request = self._world.Ialltoallv(
            [as_bytes(self._wire.pack(self._part)), self._counts, "B"],
            [as_bytes(self._rows), received, "B"],
        )

    def reduce(self) -> None:
        """Reduces this rank's slice, once it is here, and sends it to all."""
        wait(self._request)
        total = np.empty(self._mine, self._part.dtype)
        _reduce(total, self._rows, self._op, self._wire, self._divisor, self._nodes)
        del self._rows
        # The contribution has been sent, so the result may take its place.
        plain = self._wire.is_plain
        self._packed = self._part if plain else np.empty(self._part.size, self._wire.dtype)
        self._request = self._world.Iallgatherv(
            as_bytes(self._wire.pack(total)), [as_bytes(self._packed), self._counts, "B"]
        )

    def finish(self) -> None:
        """Waits for the result."""
        wait(self._request)
        if self._packed is not self._part:
            self._part[...] = self._wire.unpack(self._packed)


def _reduce(
    result: np.ndarray,
    rows: np.ndarray,
    op: ReduceOp,
    wire: Wire,
    divisor: int,
    nodes: Sequence[Sequence[int]],
) -> None:
    numbers = [wire.unpack(row) for row in rows]
    if nodes:
        sums = [np.empty_like(result) for _ in nodes]
        for total, ranks in zip(sums, nodes, strict=True):
            reduce_into(total, (numbers[rank] for rank in ranks), op)
        numbers = sums
    reduce_into(result, iter(numbers), op)
    if divisor > 1:
        divide(result, divisor)
