"""The rows of each rank in sharded files, and their order in an epoch. Index arithmetic only.

A shard is the unit of reading: a file, a Parquet row group, an image.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class RankShard:
    """The rows of one rank: every `stride`-th row of each of its shards.

    Args:
        shards: int64 array of shape `(shards,)`, the number of each shard.
        firsts: int64 array of shape `(shards,)`, the first row in each shard.
        counts: int64 array of shape `(shards,)`, the number of rows in each shard.
    """

    shards: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    stride: int

    def order(self, key: Sequence[int] | None, mixed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of an epoch: the shard of each row, and its index in the shard.

        Returns:
            Two int64 arrays of shape `(rows,)`.
        """
        positions = np.arange(len(self.shards))
        if key is None:
            return self._rows(positions)
        random = np.random.default_rng(key)
        positions = random.permutation(positions)
        orders = []
        for begin in range(0, len(positions), mixed):
            shards, rows = self._rows(positions[begin : begin + mixed])
            drawn = random.permutation(len(rows))
            orders.append((shards[drawn], rows[drawn]))
        shards, rows = zip(*orders, strict=True)
        return np.concatenate(shards), np.concatenate(rows)

    def _rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.counts[positions]
        begins = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(begins, counts)
        rows = np.repeat(self.firsts[positions], counts) + self.stride * within
        return np.repeat(self.shards[positions], counts), rows


@dataclasses.dataclass(frozen=True)
class GlobalShard:
    """One rank's rows of a global order: positions `rank`, `rank + size`, ..."""

    full: RankShard
    rank: int
    size: int

    def order(self, key: Sequence[int] | None, mixed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of an epoch, see `RankShard.order`."""
        shards, rows = self.full.order(key, mixed)
        return shards[self.rank :: self.size], rows[self.rank :: self.size]


def rank_shard(lengths: Sequence[int], rank: int, size: int) -> RankShard:
    """Returns the rows of a rank: shard i belongs to rank `i % size`.

    With fewer shards than ranks, row i belongs to rank `i % size`.
    """
    rows = np.asarray(lengths, np.int64)
    numbers = np.arange(len(rows))
    if len(rows) >= size:
        mine = numbers[rank::size]
        return RankShard(mine, np.zeros_like(mine), rows[mine], 1)
    begins = np.cumsum(rows) - rows
    firsts = (rank - begins) % size
    return RankShard(numbers, firsts, np.maximum(0, -((firsts - rows) // size)), size)


def full_shard(lengths: Sequence[int]) -> RankShard:
    """Returns all rows of all shards."""
    return rank_shard(lengths, 0, 1)


def row_counts(lengths: Sequence[int], size: int) -> list[int]:
    """Returns the number of rows of each rank, by rank."""
    return [int(rank_shard(lengths, rank, size).counts.sum()) for rank in range(size)]
