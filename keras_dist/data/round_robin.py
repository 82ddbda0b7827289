"""Partition of batches over ranks, in turn. Pure index arithmetic."""

import dataclasses

from keras_dist.data.partition import Remainder


@dataclasses.dataclass(frozen=True)
class RoundRobin:
    """The distribution of batches: batch i to rank `i % size`, then the remainder."""

    full: int
    pooled: int
    repeated: int
    steps: int


def plan_round_robin(total: int, size: int, remainder: Remainder) -> RoundRobin:
    """Returns the distribution of `total` batches over `size` ranks.

    Under `"uneven"` the remaining batches are pooled with the last full round, as their rows alone
    might be fewer than the ranks.
    """
    rounds, leftover = divmod(total, size)
    if leftover == 0 or remainder == "drop":
        return RoundRobin(rounds * size, 0, 0, rounds)
    if remainder == "pad":
        return RoundRobin(rounds * size, 0, leftover, rounds + 1)
    full = max(0, rounds - 1) * size
    return RoundRobin(full, total - full, 0, max(1, rounds))
