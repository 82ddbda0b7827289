"""Reduction of a flat array through MPI, piece by piece, see decisions 19, 41 and 59."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import (
    ReduceOp,
    accumulator,
    combine,
    divide,
    is_own_accumulator,
    reduce_into,
)
from keras_dist._engine.buckets import ALIGNMENT
from keras_dist._engine.compression import Wire
from keras_dist._engine.mpi import transfer
from keras_dist._engine.mpi.peers import combine_rows
from keras_dist._engine.mpi.transfer import as_bytes, wait
from keras_dist._engine.shm.wait import blocked

# Bytes of a piece from one rank to another: at most, from all ranks together, and at least.
PIECE_NBYTES, PIECES_NBYTES, SMALLEST_NBYTES = 2**23, 3 * 2**23, 2**16
# Of slow links: how many a segment has, and their size in bytes, at least and at most.
SLOW_PIECES, SLOW_NBYTES = 4, (2**20, 2**21)
# Up to here every rank reduces everything: one message instead of two.
SMALL_NBYTES = 32 * 1024
WINDOW = 2  # pieces of each segment that are under way: one travels while another is reduced
CONTRIBUTION, RESULT = 3, 4  # MPI tags

_MPI_OPS = {
    ReduceOp.AVERAGE: "SUM",
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
}


def piece_nbytes(ranks: int, nbytes: int, links_are_slow: bool = False) -> int:
    """Returns the size in bytes of a piece."""
    # A segment has as few pieces as their memory allows, of equal size: where a host shares its
    # cores with the network, messages that overlap with the arithmetic took longer. Of many ranks,
    # pieces are smaller, but not so small that their number would count more than their size.
    most = min(PIECE_NBYTES, max(SMALLEST_NBYTES, PIECES_NBYTES // ranks))
    segment = -(-nbytes // ranks)
    # Where links are slow, ranks wait for them: pieces are smaller, and the arithmetic overlaps.
    if links_are_slow:
        least, longest = SLOW_NBYTES
        most = min(most, longest, max(least, -(-segment // SLOW_PIECES)))
    size = -(-segment // max(1, -(-segment // most)))
    return max(SMALLEST_NBYTES, size + -size % ALIGNMENT)


class Pieces:
    """The pieces of a reduction, as one rank sees them."""

    def __init__(self, rank: int, ranks: int, size: int, step: int):
        self._rank, self._step = rank, step
        self._bounds = [size * other // ranks for other in range(ranks + 1)]
        longest = max(high - low for low, high in itertools.pairwise(self._bounds))
        self.count = -(-longest // step)  # of a segment; the last one may be empty on some ranks
        # Each rank sends to another one at a time, so that none receives from all at once.
        self.receivers = [(rank + shift) % ranks for shift in range(1, ranks)]
        self.senders = self.receivers[::-1]

    def part(self, number: int, rank: int | None = None) -> slice:
        """Returns the elements of a piece; none after the end of the segment."""
        rank = self._rank if rank is None else rank
        low = min(self._bounds[rank] + number * self._step, self._bounds[rank + 1])
        return slice(low, min(low + self._step, self._bounds[rank + 1]))


@dataclasses.dataclass(frozen=True)
class Combination:
    """How the contributions of the ranks become one result."""

    op: ReduceOp
    divisor: int = 1
    nodes: Sequence[Sequence[int]] = ()

    def reduce_into(self, result: np.ndarray, numbers: Sequence[np.ndarray]) -> None:
        if len(self.nodes) <= 1:
            reduce_into(result, iter(numbers), self.op)
            return
        total, wide = result, accumulator(result.dtype, self.op)
        if wide != result.dtype:
            total = np.empty(result.shape, wide)
        # Of each node in turn, or wide copies of all contributions would lie in memory at once.
        sums = [self._reduce_node([numbers[rank] for rank in ranks], wide) for ranks in self.nodes]
        left, right = combine_rows(sums, self._combined)
        combine(left, right, self.op, total)
        if self.divisor > 1:
            divide(total, self.divisor)
        if total is not result:
            with np.errstate(all="ignore"):
                result[...] = total.astype(result.dtype)

    def _reduce_node(self, numbers: Sequence[np.ndarray], wide: np.dtype) -> np.ndarray:
        with np.errstate(all="ignore"):  # infinities and overflow are the caller's to judge
            first, *others = (number.astype(wide, copy=False) for number in numbers)
        if not others:
            return first
        total = np.empty_like(first)
        reduce_into(total, iter((first, *others)), self.op)
        return total

    def _combined(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        total = np.empty_like(left)
        combine(left, right, self.op, total)
        return total


def reduce_through_mpi(
    world: Any,
    source: np.ndarray,
    target: np.ndarray,
    sums: Combination,
    wire: Wire,
    links_are_slow: bool = False,
    library: Any | None = None,
) -> None:
    """Reduces a flat array over ranks. Collective: every rank of `world`; blocks."""
    size, is_own = world.Get_size(), is_own_accumulator(source.dtype, sums.op)
    width = max(source.itemsize, wire.dtype.itemsize)
    fits = source.size * size * width <= transfer.MAX_NBYTES
    by_order_of_nodes = is_own and wire.is_plain and len(sums.nodes) > 1
    # Open MPI's sums of 8 and 16 bits do not wrap around as those of numpy do.
    if library is not None and by_order_of_nodes and source.dtype.kind in "fc":
        _reduce_by_library(world, source, target, sums, library)
    elif source.nbytes <= SMALL_NBYTES and fits:
        _reduce_everything(world, source, target, sums, wire)
    else:
        nbytes = min(piece_nbytes(size, source.size * width, links_are_slow), transfer.MAX_NBYTES)
        _reduce_in_pieces(world, source, target, sums, wire, max(1, nbytes // width))


def _reduce_by_library(
    world: Any, source: np.ndarray, target: np.ndarray, sums: Combination, mpi: Any
) -> None:
    step = transfer.MAX_NBYTES // source.itemsize
    op = getattr(mpi, _MPI_OPS[sums.op])
    for low in range(0, source.size, step):
        part = target[low : low + step]
        sent = mpi.IN_PLACE if target is source else source[low : low + step]
        with blocked:
            world.Allreduce(sent, part, op)
    if sums.divisor > 1:
        divide(target, sums.divisor)


def _reduce_everything(
    world: Any, source: np.ndarray, target: np.ndarray, sums: Combination, wire: Wire
) -> None:
    rows = np.empty((world.Get_size(), source.size), wire.dtype)
    with blocked:
        world.Allgather(as_bytes(wire.pack(source)), as_bytes(rows))
    total = np.empty_like(source)
    sums.reduce_into(total, [wire.unpack(row) for row in rows])
    target[...] = wire.unpack(wire.pack(total))


def _reduce_in_pieces(
    world: Any, source: np.ndarray, target: np.ndarray, sums: Combination, wire: Wire, step: int
) -> None:
    """Reduces pieces of `step` elements, some of which are under way."""
    pieces = Pieces(world.Get_rank(), world.Get_size(), source.size, step)
    messages = _ReductionMessages(world, source, target, wire, pieces)
    started = 0
    for number in range(pieces.count):
        while started < min(number + WINDOW, pieces.count):
            messages.start(started)
            started += 1
        contributions = messages.contributions(number)
        total = target[pieces.part(number)]
        # A sum in rank order may not be written over one of its terms.
        if not wire.is_plain or (target is source and not sums.nodes):
            total = np.empty_like(total)
        if total.size:  # the last piece may be empty on some ranks
            sums.reduce_into(total, contributions)
        messages.send_result(number, total)
    messages.finish()


class _ReductionMessages:
    """The messages of one reduction."""

    def __init__(
        self, world: Any, source: np.ndarray, target: np.ndarray, wire: Wire, pieces: Pieces
    ):
        self._world, self._source, self._target = world, source, target
        self._wire, self._pieces, self._rank = wire, pieces, world.Get_rank()
        self._arriving: dict[int, list[tuple[int, np.ndarray, Any]]] = {}
        self._leaving: dict[int, list[Any]] = {}
        self._results: list[tuple[slice, np.ndarray, Any]] = []
        self._sent: list[Any] = []

    def start(self, number: int) -> None:
        mine = self._pieces.part(number)
        self._arriving[number] = []
        for peer in self._pieces.senders if mine.stop > mine.start else ():
            row = np.empty(mine.stop - mine.start, self._wire.dtype)
            request = self._world.Irecv(as_bytes(row), peer, CONTRIBUTION)
            self._arriving[number].append((peer, row, request))
        self._leaving[number] = [
            self._world.Isend(self._packed(self._source[part]), peer, CONTRIBUTION)
            for peer in self._pieces.receivers
            if (part := self._pieces.part(number, peer)).stop > part.start
        ]

    def contributions(self, number: int) -> list[np.ndarray]:
        """Waits for the contributions of a piece; returns those of all ranks, in rank order."""
        mine = self._source[self._pieces.part(number)]
        rows = {self._rank: self._wire.unpack(self._wire.pack(mine))}
        for peer, row, request in self._arriving.pop(number):
            wait(request)
            rows[peer] = self._wire.unpack(row)
        return [rows[rank] for rank in sorted(rows)]

    def send_result(self, number: int, total: np.ndarray) -> None:
        packed = self._wire.pack(total)
        mine = self._target[self._pieces.part(number)]
        if not np.may_share_memory(mine, packed):
            mine[...] = self._wire.unpack(packed)
        # What has been sent may be overwritten.
        for request in self._leaving.pop(number):
            wait(request)
        for peer in self._pieces.senders:
            part = self._pieces.part(number, peer)
            if part.stop > part.start:
                row = self._target[part]
                if not self._wire.is_plain:
                    row = np.empty(row.size, packed.dtype)
                self._results.append((part, row, self._world.Irecv(as_bytes(row), peer, RESULT)))
        if total.size:
            message = as_bytes(packed)
            self._sent += [
                self._world.Isend(message, peer, RESULT) for peer in self._pieces.receivers
            ]

    def finish(self) -> None:
        for part, row, request in self._results:
            wait(request)
            if not self._wire.is_plain:
                self._target[part] = self._wire.unpack(row)
        for request in self._sent:
            wait(request)

    def _packed(self, part: np.ndarray) -> np.ndarray:
        return as_bytes(self._wire.pack(part))
