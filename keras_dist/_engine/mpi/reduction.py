"""Reduction of a flat array through MPI, piece by piece.

Each rank reduces its slice of a piece, in rank order, and the ranks exchange the slices. While a
piece is reduced, the next one is transferred. The bits of an element do not depend on the rank that
reduces it: with compression, every contribution is compressed, and every rank takes the result from
its wire format.
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

# Up to here every rank reduces everything: one message instead of two.
SMALL_NBYTES = 32 * 1024
# Bytes of a piece that each rank reduces.
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
        world: MPI communicator of the ranks.
        flat: contiguous array: the contribution of this rank, then the result.
        op: the reduction.
        wire: wire format of the numbers.
        divisor: divisor of the result.
        nodes: ranks of each node, which are reduced first: the order of larger arrays, so that
            bits do not depend on sizes. Defaults to none.
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
    # A rank receives a slice from every rank, and slices may differ in length.
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
    """A piece in transfer: `send`, `reduce`, `finish`, each collective."""

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
        """Starts to send every rank its slice. Does not block."""
        size = len(self._counts)
        self._rows = np.empty((size, self._mine), self._wire.dtype)
        received = np.full(size, self._rows[0].nbytes)
        self._request = self._world.Ialltoallv(
            [as_bytes(self._wire.pack(self._part)), self._counts, "B"],
            [as_bytes(self._rows), received, "B"],
        )

    def reduce(self) -> None:
        """Reduces the slice of this rank, once it has arrived, and starts to send it to all."""
        wait(self._request)
        total = np.empty(self._mine, self._part.dtype)
        _reduce(total, self._rows, self._op, self._wire, self._divisor, self._nodes)
        del self._rows
        # The contribution has been sent, so the result may overwrite it.
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
