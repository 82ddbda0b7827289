"""Who takes which samples, in how many batches: index arithmetic, and nothing else.

Knows numbers only: no framework, no rank of its own, no errors. Callers have checked that
there is at least one sample for every rank.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

__all__ = [
    "Deal",
    "EvenPlan",
    "Plan",
    "Remainder",
    "Rest",
    "Spread",
    "plan_deal",
    "plan_for_fewer",
    "plan_samples",
    "plan_spread",
]

Remainder = Literal["uneven", "pad", "drop"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One rank's part of a data set whose samples are dealt out one by one.

    Sample i belongs to rank `i % size`. All ranks have the same number of steps.

    Args:
        rank: whose part this is.
        size: number of ranks.
        held: number of different samples that this rank may use.
        count: number of samples it hands out in an epoch; more than `held` means that it
            repeats some, fewer that it leaves some out.
        steps: number of batches in an epoch.
        batch_size: samples in each batch but the last, which takes what is left of `count`.
    """

    rank: int
    size: int
    held: int
    count: int
    steps: int
    batch_size: int

    @property
    def extra(self) -> int:
        """Number of samples that this rank hands out a second time."""
        return max(0, self.count - self.held)

    def bounds(self, step: int) -> tuple[int, int]:
        """Returns where batch `step` begins and ends in the order of an epoch."""
        start = step * self.batch_size
        return start, self.count if step == self.steps - 1 else start + self.batch_size

    def sizes(self) -> list[int]:
        """Returns the number of samples of each batch."""
        return [stop - start for start, stop in map(self.bounds, range(self.steps))]

    def limited(self, steps: int) -> "Plan":
        """Returns the plan that ends after its first `steps` batches."""
        if steps == self.steps:
            return self
        return dataclasses.replace(self, steps=steps, count=steps * self.batch_size)

    def order(self, seed: int | None, epoch: int) -> np.ndarray:
        """Returns the indices of the samples in the order in which an epoch hands them out.

        Args:
            seed: one number for the job; `None` keeps the order of the data set.
            epoch: number of the epoch; each has an order of its own.

        Returns:
            int64 array of shape `(count,)`.
        """
        places = np.arange(max(self.held, self.count)) % self.held
        if seed is not None:
            places = np.random.default_rng([seed, self.rank, epoch]).permutation(places)
        return self.rank + self.size * places[: self.count]


def plan_samples(total: int, size: int, rank: int, batch_size: int, remainder: Remainder) -> Plan:
    """Plans how single samples are shared out.

    Args:
        total: number of samples, at least `size`.
        size: number of ranks.
        rank: whose plan is wanted.
        batch_size: samples per step of one rank.
        remainder: `"uneven"`: each sample once, so counts differ by at most 1 between ranks
            and the last batch has 1 to `batch_size + 1` samples. `"pad"`: ranks below the
            largest count repeat one sample, so batches of a step are equal on all ranks.
            `"drop"`: all batches have `batch_size` samples, or as many as every rank has.
    """
    fewest, left_over = divmod(total, size)
    held = fewest + (rank < left_over)
    if remainder == "uneven":
        return Plan(rank, size, held, held, _ceil(fewest, batch_size), batch_size)
    if remainder == "pad":
        most = fewest + (left_over > 0)
        return Plan(rank, size, held, most, _ceil(most, batch_size), batch_size)
    batch_size = min(batch_size, fewest)
    steps = fewest // batch_size
    return Plan(rank, size, fewest, steps * batch_size, steps, batch_size)


@dataclasses.dataclass(frozen=True)
class EvenPlan(Plan):
    """A part whose batches differ by one sample at most; `batch_size` is of no account."""

    def bounds(self, step: int) -> tuple[int, int]:
        """Returns where batch `step` begins and ends in the order of an epoch."""
        return step * self.count // self.steps, (step + 1) * self.count // self.steps


def plan_for_fewer(plan: Plan, total: int, size: int, rank: int, remainder: Remainder) -> EvenPlan:
    """Plans how the samples are shared out when there are fewer ranks than before.

    The number of steps stays, and so does the number of samples in a step of all ranks.

    Args:
        plan: that of rank 0 when none had died yet.
        total: number of samples.
        size: number of ranks now.
        rank: whose plan is wanted, by its number now.
        remainder: as for `plan_samples`.
    """
    now = plan_samples(total, size, rank, plan.batch_size, remainder)
    limit = plan.steps * plan.batch_size * plan.size // size  # where an epoch was to end early
    count = min(now.count, limit) if plan.count < plan.held else now.count
    if remainder == "drop":
        count = min(now.held, limit) // plan.steps * plan.steps
    return EvenPlan(rank, size, now.held, count, plan.steps, plan.batch_size)


@dataclasses.dataclass(frozen=True)
class Rest:
    """One rank's part of what is left of an epoch in which ranks have died.

    The number of steps stays; batches grow, and differ by one sample at most.

    Args:
        rank: whose part this is.
        size: number of ranks now.
        indices: int64 array of shape `(left,)`, the samples that are left for all ranks; at least
            one for each rank and step.
        first_step: the step with which it begins.
        steps: number of batches in the whole epoch.
        earlier: returns the indices of this rank's samples of a step before that: another rank
            had read further ahead when the rest was shared out.
    """

    rank: int
    size: int
    indices: np.ndarray
    first_step: int
    steps: int
    earlier: Callable[[int], np.ndarray]

    def left(self, first_step: int) -> np.ndarray:
        """Returns the indices of this rank's samples from a step on, in order."""
        mine = self.indices[self.rank :: self.size]
        return mine[self._begin(first_step, len(mine)) :]

    def batch(self, step: int) -> np.ndarray:
        """Returns the indices of the samples of a step."""
        if step < self.first_step:
            return self.earlier(step)
        mine = self.indices[self.rank :: self.size]
        return mine[self._begin(step, len(mine)) : self._begin(step + 1, len(mine))]

    def _begin(self, step: int, count: int) -> int:
        return (step - self.first_step) * count // (self.steps - self.first_step)


@dataclasses.dataclass(frozen=True)
class Deal:
    """How ready-made batches are dealt out: batch i to rank `i % size`, as far as that goes.

    Args:
        dealt: number of batches at the front that go round; a multiple of the ranks.
        pooled: number of batches after these whose rows are shared evenly by all ranks, as
            one further step.
        lent: number of batches after these for a further step in which they go to the first
            ranks and are handed out again to the others. Never with `pooled`.
        steps: number of steps of every rank.
    """

    dealt: int
    pooled: int
    lent: int
    steps: int


def plan_deal(total: int, size: int, remainder: Remainder) -> Deal:
    """Plans how `total` ready-made batches are shared out over `size` ranks.

    A batch may be short, so the rows of a few left-over batches alone might not reach every
    rank: under `"uneven"` they are pooled with the last full round.
    """
    rounds, left_over = divmod(total, size)
    if left_over == 0 or remainder == "drop":
        return Deal(rounds * size, 0, 0, rounds)
    if remainder == "pad":
        return Deal(rounds * size, 0, left_over, rounds + 1)
    dealt = max(0, rounds - 1) * size
    return Deal(dealt, total - dealt, 0, max(1, rounds))


@dataclasses.dataclass(frozen=True)
class Spread:
    """How one rank hands out elements when the ranks hold different numbers of them.

    Args:
        count: number of elements that this rank hands out in an epoch.
        sizes: number of elements of each batch.
    """

    count: int
    sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of batches in an epoch."""
        return len(self.sizes)

    def limited(self, steps: int) -> "Spread":
        """Returns the plan that ends after its first `steps` batches."""
        return Spread(sum(self.sizes[:steps]), self.sizes[:steps])


def plan_spread(
    counts: Sequence[int], rank: int, batch_size: int, remainder: Remainder
) -> Spread | None:
    """Plans the batches of a rank from the numbers of elements that all ranks hold.

    Args:
        counts: number of elements of each rank, by rank.
        rank: whose plan is wanted.
        batch_size: elements per step of one rank, at most.
        remainder: `"uneven"`: each element once; the rank that holds most sets the number
            of steps, the others spread theirs over as many. `"pad"`: all hand out as many
            as the rank that holds most. `"drop"`: full batches alone, as many as the rank
            that holds fewest can fill.

    Returns:
        The plan, or `None` when some rank cannot put an element into every batch.
    """
    fewest, most = min(counts), max(counts)
    if fewest == 0:
        return None
    if remainder == "drop":
        batch_size = min(batch_size, fewest)
        steps = fewest // batch_size
        return Spread(steps * batch_size, (batch_size,) * steps)
    steps = _ceil(most, batch_size)
    if remainder == "pad":
        return Spread(most, (batch_size,) * (steps - 1) + (most - (steps - 1) * batch_size,))
    if fewest < steps:
        return None
    small, larger = divmod(counts[rank], steps)
    return Spread(counts[rank], (small + 1,) * larger + (small,) * (steps - larger))


def _ceil(count: int, batch_size: int) -> int:
    return -(-count // batch_size)
