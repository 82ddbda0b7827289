"""Partition of samples over ranks. Pure index arithmetic.

Callers have checked that there is at least one sample for every rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

Remainder = Literal["uneven", "pad", "drop"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shard of a rank, in a data set whose samples are distributed one by one.

    Sample i belongs to rank `i % size`. All ranks have the same number of steps.
    """

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

    def sizes(self) -> list[int]:
        """Returns the size of each batch in samples."""
        return [stop - start for start, stop in map(self.bounds, range(self.steps))]

    def limited(self, steps: int) -> "Plan":
        """Returns the plan that ends after its first `steps` batches."""
        if steps == self.steps:
            return self
        return dataclasses.replace(self, steps=steps, count=steps * self.batch_size)

    def order(self, seed: int | None, epoch: int) -> np.ndarray:
        """Returns the indices of the samples of an epoch, in order.

        Returns:
            int64 array of shape `(count,)`.
        """
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
        return Plan(rank, size, held, held, _ceil(fewest, batch_size), batch_size)
    if remainder == "pad":
        most = fewest + (leftover > 0)
        return Plan(rank, size, held, most, _ceil(most, batch_size), batch_size)
    batch_size = min(batch_size, fewest)
    steps = fewest // batch_size
    return Plan(rank, size, fewest, steps * batch_size, steps, batch_size)


@dataclasses.dataclass(frozen=True)
class EvenPlan(Plan):
    """A plan whose batches differ by at most one sample; `batch_size` is not used."""

    def bounds(self, step: int) -> tuple[int, int]:
        """Returns the first position and the end of batch `step` in the order of an epoch."""
        return step * self.count // self.steps, (step + 1) * self.count // self.steps


def plan_after_change(
    plan: Plan, total: int, size: int, rank: int, remainder: Remainder
) -> EvenPlan:
    """Returns the plan of a rank after others have died.

    The number of steps and the global batch stay the same.
    """
    now = plan_samples(total, size, rank, plan.batch_size, remainder)
    limit = plan.steps * plan.batch_size * plan.size // size  # an epoch may have been limited
    count = min(now.count, limit) if plan.count < plan.held else now.count
    if remainder == "drop":
        count = min(now.held, limit) // plan.steps * plan.steps
    return EvenPlan(rank, size, now.held, count, plan.steps, plan.batch_size)


def _ceil(count: int, batch_size: int) -> int:
    return -(-count // batch_size)
