"""Partition of samples, batches and files over ranks, and their order. Pure index arithmetic.

Callers have checked that there is at least one sample for every rank.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

Remainder = Literal["uneven", "pad", "drop"]
Shuffle = bool | Literal["global"]
Way = Literal["rank", "global", "draw"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The samples of a rank: sample i belongs to rank `i % size`. All ranks have as many steps."""

    rank: int
    size: int
    held: int
    count: int
    steps: int
    batch_size: int

    @property
    def extra(self) -> int:
        """Number of samples that are repeated."""
        return max(0, self.count - self.held)

    def bounds(self, step: int) -> tuple[int, int]:
        """Returns the first position and the end of batch `step` in the order of an epoch."""
        start = step * self.batch_size
        return start, self.count if step == self.steps - 1 else start + self.batch_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each batch in samples."""
        return tuple(stop - start for start, stop in map(self.bounds, range(self.steps)))

    def limited(self, steps: int) -> "Plan":
        """Returns the plan that ends after its first `steps` batches."""
        if steps == self.steps:
            return self
        return dataclasses.replace(self, steps=steps, count=self.bounds(steps)[0])

    def order(self, seed: int | None, epoch: int) -> np.ndarray:
        """Returns the indices of the samples of an epoch in order: int64 of shape `(count,)`."""
        positions = np.arange(max(self.held, self.count)) % self.held
        if seed is not None:
            positions = np.random.default_rng([seed, self.rank, epoch]).permutation(positions)
        return self.rank + self.size * positions[: self.count]


PlanFor = Callable[[int, int], Plan]  # from a rank and the number of ranks


def plan_samples(total: int, size: int, rank: int, batch_size: int, remainder: Remainder) -> Plan:
    """Returns the plan of a rank for a data set of samples."""
    fewest, leftover = divmod(total, size)
    held = fewest + (rank < leftover)
    if remainder == "uneven":
        return Plan(rank, size, held, held, -(-fewest // batch_size), batch_size)
    if remainder == "pad":
        most = fewest + (leftover > 0)
        return Plan(rank, size, held, most, -(-most // batch_size), batch_size)
    batch_size = min(batch_size, fewest)
    steps = fewest // batch_size
    return Plan(rank, size, fewest, steps * batch_size, steps, batch_size)


@dataclasses.dataclass(frozen=True)
class EvenPlan(Plan):
    """A plan whose batches differ by at most one sample; `batch_size` is not used."""

    def bounds(self, step: int) -> tuple[int, int]:
        return step * self.count // self.steps, (step + 1) * self.count // self.steps


def plan_after_change(
    plan: Plan, total: int, size: int, rank: int, remainder: Remainder
) -> EvenPlan:
    """Returns the plan after ranks have died: number of steps and global batch stay the same."""
    now = plan_samples(total, size, rank, plan.batch_size, remainder)
    limit = plan.steps * plan.batch_size * plan.size // size  # an epoch may have been limited
    count = min(now.count, limit) if plan.count < plan.held else now.count
    if remainder == "drop":
        count = min(now.held, limit) // plan.steps * plan.steps
    return EvenPlan(rank, size, now.held, count, plan.steps, plan.batch_size)


def order_of(way: Way | None, seed: int, total: int, plan: Plan, epoch: int) -> np.ndarray:
    """Returns a rank's indices of samples in an epoch, in order: int64 `(plan.count,)`."""
    if way == "draw":
        # The stream of SeedSequence.spawn, without spawning the streams before it.
        stream = np.random.SeedSequence(seed, spawn_key=(plan.rank, epoch))
        return np.random.default_rng(stream).integers(total, size=plan.count)
    if way == "rank":
        return plan.order(seed, epoch)
    indices = plan.order(None, epoch)
    if way == "global":
        return np.random.default_rng([seed, epoch]).permutation(total)[indices]
    return indices


# --- Ranks with different numbers of elements


@dataclasses.dataclass(frozen=True)
class Spread(Plan):
    """A plan of which the first `larger` batches have one element more than `batch_size`."""

    larger: int

    def bounds(self, step: int) -> tuple[int, int]:
        start = step * self.batch_size + min(step, self.larger)
        return start, start + self.batch_size + (step < self.larger)


def plan_spread(
    counts: Sequence[int], rank: int, batch_size: int, remainder: Remainder
) -> Plan | None:
    """Returns the plan of a rank; `None` if a rank has fewer elements than there are steps."""
    fewest, most, size, held = min(counts), max(counts), len(counts), counts[rank]
    if fewest == 0:
        return None
    if remainder == "drop":
        batch_size = min(batch_size, fewest)
        steps = fewest // batch_size
        return Plan(rank, size, held, steps * batch_size, steps, batch_size)
    steps = -(-most // batch_size)
    if remainder == "pad":
        return Plan(rank, size, held, most, steps, batch_size)
    if fewest < steps:
        return None
    small, larger = divmod(held, steps)
    return Spread(rank, size, held, held, steps, small, larger)


# --- Batches, in turn


@dataclasses.dataclass(frozen=True)
class RoundRobin:
    """The distribution of batches: batch i to rank `i % size`, then the remainder."""

    full: int
    pooled: int
    repeated: int
    steps: int


def plan_round_robin(total: int, size: int, remainder: Remainder) -> RoundRobin:
    """Returns the distribution of `total` batches over `size` ranks."""
    rounds, leftover = divmod(total, size)
    if leftover == 0 or remainder == "drop":
        return RoundRobin(rounds * size, 0, 0, rounds)
    if remainder == "pad":
        return RoundRobin(rounds * size, 0, leftover, rounds + 1)
    # Pooled with the last full round, as the rows of the rest might be fewer than the ranks.
    full = max(0, rounds - 1) * size
    return RoundRobin(full, total - full, 0, max(1, rounds))
