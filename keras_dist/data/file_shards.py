"""The rows of each rank in many files, and their order in an epoch. Pure index arithmetic.

A piece is read at once: a file, a part of a file, an image. It has a number of rows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

__all__ = ["RankShard", "StridedShard", "counts_of", "shard_of", "whole"]


@dataclasses.dataclass(frozen=True)
class RankShard:
    """The rows of one rank: every `stride`-th row of each of its pieces.

    Args:
        pieces: int64 array of shape `(pieces,)`, numbers of the pieces.
        firsts: int64 array of shape `(pieces,)`, first row in each piece.
        counts: int64 array of shape `(pieces,)`, number of rows in each piece.
        stride: distance of rows in a piece.
    """

    pieces: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    stride: int

    def order(self, key: Sequence[int] | None, mixed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the order of the rows in an epoch.

        Args:
            key: seed of the order; `None` keeps the order of the files.
            mixed: number of consecutive pieces, in shuffled order, whose rows are shuffled
                together.

        Returns:
            Two int64 arrays of shape `(rows,)`: the piece of each row, and its index there.
        """
        places = np.arange(len(self.pieces))
        if key is None:
            return self._rows(places)
        random = np.random.default_rng(key)
        places = random.permutation(places)
        orders = []
        for begin in range(0, len(places), mixed):
            pieces, rows = self._rows(places[begin : begin + mixed])
            shuffled = random.permutation(len(rows))
            orders.append((pieces[shuffled], rows[shuffled]))
        pieces, rows = zip(*orders, strict=True)
        return np.concatenate(pieces), np.concatenate(rows)

    def _rows(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.counts[places]
        begins = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(begins, counts)
        rows = np.repeat(self.firsts[places], counts) + self.stride * within
        return np.repeat(self.pieces[places], counts), rows


@dataclasses.dataclass(frozen=True)
class StridedShard:
    """The rows of one rank in one order of all rows: those at positions r, r + size, ...

    Args:
        whole: all rows.
        rank: the rank.
        size: number of ranks.
    """

    whole: RankShard
    rank: int
    size: int

    def order(self, key: Sequence[int] | None, mixed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of an epoch, see `RankShard.order`."""
        pieces, rows = self.whole.order(key, mixed)
        return pieces[self.rank :: self.size], rows[self.rank :: self.size]


def shard_of(lengths: Sequence[int], rank: int, size: int) -> RankShard:
    """Returns the rows of a rank: piece i belongs to rank `i % size`; with fewer pieces, row i.

    Args:
        lengths: number of rows of each piece.
        rank: the rank.
        size: number of ranks.
    """
    rows = np.asarray(lengths, np.int64)
    numbers = np.arange(len(rows))
    if len(rows) >= size:
        mine = numbers[rank::size]
        return RankShard(mine, np.zeros_like(mine), rows[mine], 1)
    starts = np.cumsum(rows) - rows
    firsts = (rank - starts) % size
    return RankShard(numbers, firsts, np.maximum(0, -((firsts - rows) // size)), size)


def whole(lengths: Sequence[int]) -> RankShard:
    """Returns all rows of all pieces, as the shard of one rank."""
    return shard_of(lengths, 0, 1)


def counts_of(lengths: Sequence[int], size: int) -> list[int]:
    """Returns the number of rows of each rank."""
    return [int(shard_of(lengths, rank, size).counts.sum()) for rank in range(size)]
