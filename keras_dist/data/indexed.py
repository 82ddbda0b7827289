"""Data whose samples are known by number: which of them a step takes on this rank, and when.

Whatever the samples are, they come out as batches of `Rows`. Knows no framework.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from keras_dist.data.batches import for_keras
from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.order import Order
from keras_dist.data.partition import Plan, Rest, plan_for_fewer
from keras_dist.data.shard_options import Fact, ShardOptions

__all__ = ["DEFAULT_BATCH_SIZE", "Batches", "IndexedSource", "Rows", "plan_among"]

DEFAULT_BATCH_SIZE = 32
WHOLE = "Give shard() the same whole data set on every rank: it takes the part itself."

PlanAmong = Callable[[int, int], Plan]  # of a rank and the number of ranks


class Rows(Protocol):
    """All samples of a data set."""

    @property
    def total(self) -> int:
        """How many there are."""

    @property
    def example(self) -> Any:
        """Arrays, nested like a batch, of its dtypes and of its shapes but for the first axis.

        `None` where batches may differ in them.
        """

    @property
    def facts(self) -> list[Fact]:
        """What must be equal on all ranks."""

    def take(self, indices: np.ndarray) -> Any:
        """Returns a batch of the samples with these numbers, new arrays."""


class IndexedSource:
    """Samples that are known by number, the whole data set on every rank.

    Args:
        rows: the samples.
        options: options of `shard`.
        batch_size: samples in each step on a rank, unless `options` has a batch size.
        of: what the samples are called, a plural.

    Raises:
        DataError: there are fewer samples than ranks or steps.
    """

    held = None

    def __init__(
        self,
        rows: Rows,
        options: ShardOptions,
        batch_size: int = DEFAULT_BATCH_SIZE,
        of: str = "samples",
    ):
        batch_size = options.batch_size or batch_size
        if options.draws:
            plan = _plan_of_draws(rows.total, batch_size, options, of)
        else:
            options.need_samples(rows.total, of)
            plan = options.plan(rows.total, batch_size)
            options.need_steps(plan.steps)
            plan = plan.limited(options.steps or plan.steps)
        self.rows = rows
        self.facts = [*rows.facts, Fact(f"the number of {of}", rows.total, WHOLE), *options.facts()]
        order = Order(options.way, options.seed, rows.total)
        may_shrink = options.may_shrink and not options.draws
        among = functools.partial(plan_among, rows.total, options, batch_size, plan.steps)
        kind = kind_of(options.lasting(self.facts))
        self.batches = Batches(rows, plan, order, kind, among if may_shrink else None)

    @property
    def epochs(self) -> Epochs:
        """The epochs of the data."""
        return self.batches.epochs

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns this rank's batches in the form that suits the backend of Keras."""
        return for_keras(self.batches)


class Batches:
    """One rank's batches, for any epoch. Holds no copy of the samples.

    Args:
        rows: the whole data set.
        plan: this rank's part of it.
        order: the order of every epoch.
        kind: what the whole data set is, see `Epochs`.
        plan_among: makes the plan of a rank among fewer, of its number and theirs. Defaults to
            none: batches keep their sizes.
    """

    def __init__(
        self,
        rows: Rows,
        plan: Plan,
        order: Order,
        kind: str = "arrays",
        plan_among: PlanAmong | None = None,
    ):
        self.rows = rows
        self.plan = plan
        self.position = (0, 0)
        self.lock = threading.RLock()
        self._plan_among = plan_among
        self.epochs = Epochs(kind, self if plan_among is not None else None)
        if not order.knows_ranks:
            self.epochs.global_batch = plan.batch_size * plan.size
        self._orders = order
        self._latest = (0, order.of(plan, 0))
        self._rest: tuple[int, Rest] | None = None  # of an epoch, by its number

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the samples of a step, in the structure of the data."""
        return self.rows.take(self.indices(epoch, step))

    def indices(self, epoch: int, step: int) -> np.ndarray:
        """Returns the numbers of the samples of a step; whoever asks for them reads them."""
        with self.lock:
            self.position = max(self.position, (epoch, step + 1))
            return self._reading(epoch)(step)

    @property
    def example(self) -> Any:
        """Arrays like a batch, see `Rows`."""
        return self.rows.example

    @property
    def sizes(self) -> set[int]:
        """The numbers of samples that batches may have; none where they may change."""
        return set(self.plan.sizes()) if self._plan_among is None else set()

    def share_out(self, rank: int, size: int, position: tuple[int, int] | None) -> None:
        """Shares the data out among fewer ranks, from a batch on, or else from the next epoch."""
        if self._plan_among is None or size == self.plan.size:
            return
        with self.lock:
            if position is not None and position[1] < self.plan.steps:
                left = np.concatenate([self._left(r, *position) for r in range(self.plan.size)])
                epoch, step = position
                rest = Rest(rank, size, left, step, self.plan.steps, self._reading(epoch))
                self._rest = epoch, rest
            self.plan = self._plan_among(rank, size)
            self._latest = (-1, np.empty(0, np.int64))

    def _reading(self, epoch: int) -> Callable[[int], np.ndarray]:
        """Returns what gives the numbers of the samples of a step of an epoch."""
        if self._rest is not None and self._rest[0] == epoch:
            return self._rest[1].batch
        order, plan = self._order(epoch), self.plan
        return lambda step: order[slice(*plan.bounds(step))]

    def _left(self, rank: int, epoch: int, step: int) -> np.ndarray:
        """Returns what one of the ranks before, perhaps dead now, has not read of an epoch."""
        if self._rest is not None and self._rest[0] == epoch:
            return dataclasses.replace(self._rest[1], rank=rank).left(step)
        plan = cast(PlanAmong, self._plan_among)(rank, self.plan.size)
        return self._orders.of(plan, epoch)[plan.bounds(step)[0] :]

    def _order(self, epoch: int) -> np.ndarray:
        known, order = self._latest
        if known != epoch and (self._orders.way is not None or known < 0):
            order = self._orders.of(self.plan, epoch)
            self._latest = (epoch, order)
        return order


def plan_among(
    total: int, options: ShardOptions, batch_size: int, steps: int, rank: int, size: int
) -> Plan:
    """Returns the plan of a rank among so many, of which others may have died."""
    first_rank = rank if size == options.size else 0
    before = dataclasses.replace(options, rank=first_rank)
    first = before.plan(total, batch_size).limited(steps)
    if size == options.size:
        return first
    return plan_for_fewer(first, total, size, rank, options.remainder)


def _plan_of_draws(total: int, batch_size: int, options: ShardOptions, of: str) -> Plan:
    """Returns the plan of a rank that draws from the whole: by default as many as an epoch has."""
    if total == 0:
        options.need_samples(total, of)
    steps = options.steps or -(-total // (options.size * batch_size))
    return Plan(options.rank, options.size, total, steps * batch_size, steps, batch_size)
