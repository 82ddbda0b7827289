"""Sharding of data with random access: the samples of each step on this rank.

Independent of frameworks.
"""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist.data.batches import for_keras
from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.order import Order
from keras_dist.data.partition import Plan, PlanFor, plan_after_change
from keras_dist.data.shard_options import Fact, ShardOptions

DEFAULT_BATCH_SIZE = 32
WHOLE = "Pass shard() the same whole data set on every rank: it selects the shard of the rank."


class Rows(Protocol):
    """All samples of a data set."""

    @property
    def total(self) -> int:
        """Number of samples."""

    @property
    def example(self) -> Any:
        """Arrays in the structure of a batch, with its dtypes and shapes except the first axis.

        `None` if batches may differ in them.
        """

    @property
    def facts(self) -> list[Fact]:
        """Properties that must be equal on all ranks."""

    def take(self, indices: np.ndarray) -> Any:
        """Returns new arrays with the samples at these indices."""


class IndexedSource:
    """A data set with random access, whole on every rank."""

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
        plan_of = functools.partial(plan_for, rows.total, options, batch_size, plan.steps)
        kind = kind_of(options.lasting(self.facts))
        self.batches = Batches(rows, plan, order, kind, plan_of if may_shrink else None)
        if rows.example is not None:
            self.epochs.shapes = plan.count, plan.steps, plan.batch_size
        if options.way is None and of == "samples":
            self.epochs.samples = functools.partial(plan.order, None, 0)

    @property
    def epochs(self) -> Epochs:
        """The epochs of the data."""
        return self.batches.epochs

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns the batches of this rank as data for the Keras backend."""
        return for_keras(self.batches)


class Batches:
    """The batches of a rank in any epoch. Keeps no copy of the samples."""

    def __init__(
        self,
        rows: Rows,
        plan: Plan,
        order: Order,
        kind: str = "arrays",
        plan_for: PlanFor | None = None,
    ):
        self.rows = rows
        self.plan = plan
        self._lock = threading.RLock()
        self._plan_among = plan_for
        self.epochs = Epochs(kind, self if plan_for is not None else None)
        if not order.knows_ranks:
            self.epochs.global_batch = plan.batch_size * plan.size
        self._order_by = order
        self._cached = (0, order.of(plan, 0))

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the samples of a step, in the structure of the data."""
        return self.rows.take(self.indices(epoch, step))

    def indices(self, epoch: int, step: int) -> np.ndarray:
        """Returns the indices of the samples of a step."""
        with self._lock:
            return self._order(epoch)[slice(*self.plan.bounds(step))]

    @property
    def example(self) -> Any:
        """Arrays in the structure of a batch, see `Rows`."""
        return self.rows.example

    @property
    def sizes(self) -> set[int]:
        """The possible numbers of samples of a batch; empty if they may change."""
        return set(self.plan.sizes()) if self._plan_among is None else set()

    def reshard(self, rank: int, size: int) -> None:
        """Distributes the data over other ranks, from the next epoch on."""
        if self._plan_among is None or (rank, size) == (self.plan.rank, self.plan.size):
            return
        with self._lock:
            self.plan = self._plan_among(rank, size)
            self.epochs.shapes = None  # batches have other sizes
            self._cached = (-1, np.empty(0, np.int64))

    def _order(self, epoch: int) -> np.ndarray:
        known, order = self._cached
        if known != epoch and (self._order_by.way is not None or known < 0):
            order = self._order_by.of(self.plan, epoch)
            self._cached = (epoch, order)
        return order


def plan_for(
    total: int, options: ShardOptions, batch_size: int, steps: int, rank: int, size: int
) -> Plan:
    """Returns the plan of a rank after ranks may have died."""
    first_rank = rank if size == options.size else 0
    before = dataclasses.replace(options, rank=first_rank)
    first = before.plan(total, batch_size).limited(steps)
    if size == options.size:
        return first
    return plan_after_change(first, total, size, rank, options.remainder)


def _plan_of_draws(total: int, batch_size: int, options: ShardOptions, of: str) -> Plan:
    """Returns the plan of a rank that draws samples; by default as many as an epoch has."""
    if total == 0:
        options.need_samples(total, of)
    steps = options.steps or -(-total // (options.size * batch_size))
    return Plan(options.rank, options.size, total, steps * batch_size, steps, batch_size)
