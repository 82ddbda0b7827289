"""Pieces: which rank reduces which part of an array, and who sends what to whom. Pure.

Each rank reduces a segment of the array, piece by piece: it receives a piece from every other rank
and sends them the result.
"""

import itertools

from keras_dist._engine.buckets import ALIGNMENT

# Bytes of a piece from one rank to another: at most, from all ranks together, and at least.
PIECE_NBYTES, PIECES_NBYTES, SMALLEST_NBYTES = 2**23, 3 * 2**23, 2**16
# Of slow links: how many a segment has, and their size in bytes, at least and at most.
SLOW_PIECES, SLOW_NBYTES = 4, (2**20, 2**21)


def piece_nbytes(ranks: int, nbytes: int, links_are_slow: bool = False) -> int:
    """Returns the size in bytes of a piece.

    A segment has as few pieces as their memory allows, of equal size: where a host shares its cores
    with the network, messages that overlap with the arithmetic took longer. Where ranks wait for
    slow links, pieces are smaller, and the arithmetic overlaps. Of many ranks, pieces are smaller,
    but not so small that their number would count more than their size.

    Args:
        nbytes: size in bytes of the array.
    """
    most = min(PIECE_NBYTES, max(SMALLEST_NBYTES, PIECES_NBYTES // ranks))
    segment = -(-nbytes // ranks)
    if links_are_slow:
        least, longest = SLOW_NBYTES
        most = min(most, longest, max(least, -(-segment // SLOW_PIECES)))
    size = -(-segment // max(1, -(-segment // most)))
    return max(SMALLEST_NBYTES, size + -size % ALIGNMENT)


class Pieces:
    """The pieces of a reduction, as one rank sees them.

    Attributes:
        count: number of pieces of a segment; the last one may be empty on some ranks.
        receivers: ranks in the order in which this rank sends to them: each rank sends to another
            one at a time, so that none receives from all at once.
        senders: ranks in the order in which messages for this rank arrive.
    """

    def __init__(self, rank: int, ranks: int, size: int, step: int):
        self._rank, self._step = rank, step
        self._bounds = [size * other // ranks for other in range(ranks + 1)]
        longest = max(high - low for low, high in itertools.pairwise(self._bounds))
        self.count = -(-longest // step)
        self.receivers = [(rank + shift) % ranks for shift in range(1, ranks)]
        self.senders = self.receivers[::-1]

    def part(self, number: int, rank: int | None = None) -> slice:
        """Returns the elements of a piece; none after the end of the segment."""
        rank = self._rank if rank is None else rank
        low = min(self._bounds[rank] + number * self._step, self._bounds[rank + 1])
        return slice(low, min(low + self._step, self._bounds[rank + 1]))
