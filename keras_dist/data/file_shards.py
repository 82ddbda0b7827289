"""Which rows of many files belong to a rank, and in which order an epoch hands them out.

A piece is what is read at once: a file, a part of one, an image; it has a number of rows. Index
arithmetic, and nothing else: no rank of its own, no errors.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

__all__ = ["RankShard", "Turns", "counts_of", "share_of", "whole"]


@dataclasses.dataclass(frozen=True)
class RankShard:
    """One rank's rows: of each of its pieces every `stride`-th.

    Args:
        pieces: int64 array of shape `(pieces,)`, their numbers.
        firsts: int64 array of shape `(pieces,)`, in each the first row.
        counts: int64 array of shape `(pieces,)`, in each how many rows.
        stride: from one row to the next.
    """

    pieces: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    stride: int

    def order(self, key: Sequence[int] | None, mixed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of an epoch: for each its piece, and its place there.

        Args:
            key: whole numbers from which the order follows; `None` keeps that of the files.
            mixed: how many pieces are shuffled together, after their own order was drawn.

        Returns:
            Two int64 arrays of shape `(rows,)`.
        """
        places = np.arange(len(self.pieces))
        if key is None:
            return self._rows(places)
        random = np.random.default_rng(key)
        places = random.permutation(places)
        orders = []
        for begin in range(0, len(places), mixed):
            pieces, rows = self._rows(places[begin : begin + mixed])
            drawn = random.permutation(len(rows))
            orders.append((pieces[drawn], rows[drawn]))
        pieces, rows = zip(*orders, strict=True)
        return np.concatenate(pieces), np.concatenate(rows)

    def _rows(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.counts[places]
        begins = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(begins, counts)
        rows = np.repeat(self.firsts[places], counts) + self.stride * within
        return np.repeat(self.pieces[places], counts), rows


@dataclasses.dataclass(frozen=True)
class Turns:
    """One rank's rows of one order of the whole: what comes at places r, r + size, ...

    Args:
        whole: all rows.
        rank: whose part this is.
        size: number of ranks.
    """

    whole: RankShard
    rank: int
    size: int

    def order(self, key: Sequence[int] | None, mixed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of an epoch, see `RankShard.order`."""
        pieces, rows = self.whole.order(key, mixed)
        return pieces[self.rank :: self.size], rows[self.rank :: self.size]


def share_of(lengths: Sequence[int], rank: int, size: int) -> RankShard:
    """Returns a rank's share: piece i of rank `i % size`, or row i where there are fewer pieces.

    Args:
        lengths: rows of each piece.
        rank: whose share is wanted.
        size: number of ranks.
    """
    rows = np.asarray(lengths, np.int64)
    numbers = np.arange(len(rows))
    if len(rows) >= size:
        mine = numbers[rank::size]
        return RankShard(mine, np.zeros_like(mine), rows[mine], 1)
    begins = np.cumsum(rows) - rows
    firsts = (rank - begins) % size
    return RankShard(numbers, firsts, np.maximum(0, -((firsts - rows) // size)), size)


def whole(lengths: Sequence[int]) -> RankShard:
    """Returns the share of a rank that has all rows of all these pieces."""
    return share_of(lengths, 0, 1)


def counts_of(lengths: Sequence[int], size: int) -> list[int]:
    """Returns how many rows each rank has, by rank."""
    return [int(share_of(lengths, rank, size).counts.sum()) for rank in range(size)]
