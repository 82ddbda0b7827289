"""Sharding of data with random access: the samples of each step on this rank."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.partition import Plan, PlanFor, order_of
from keras_dist.data.shard_options import Fact, ShardOptions

DEFAULT_BATCH_SIZE = 32
WHOLE = "Pass shard() the same whole data set on every rank: it selects the shard of the rank."
SEEDED = f"{WHOLE} Shuffle or split it before with a fixed seed, the same on all ranks."


class IndexedSource:
    """A data set with random access, whole on every rank; see `IndexedBatches`."""

    held = None

    def __init__(
        self,
        total: int,
        example: Any,
        take: Any,
        facts: Sequence[Fact],
        options: ShardOptions,
        batch_size: int = DEFAULT_BATCH_SIZE,
        of: str = "samples",
    ):
        batch_size = options.batch_size or batch_size
        plan = options.epoch_plan(total, batch_size, of)
        self.facts = [*facts, Fact(f"the number of {of}", total, WHOLE), *options.facts()]
        self.batches = IndexedBatches(
            example,
            take,
            plan,
            functools.partial(order_of, options.way, options.seed, total),
            kind_of(options.lasting(self.facts)),
            None if options.way in ("rank", "draw") else plan.batch_size * plan.size,
            options.plans_after_loss(total, batch_size, plan.steps),
        )
        self.epochs = self.batches.epochs
        if example is not None:
            self.epochs.shapes = plan.count, plan.steps, plan.batch_size
        if options.way is None and of == "samples":
            self.epochs.samples = functools.partial(plan.order, None, 0)

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns the batches of this rank as data for the Keras backend."""
        return for_keras(self.batches)


class Batches:
    """The batches of a rank in any epoch, like `example`; `None`: shapes and dtypes may differ."""

    def __init__(
        self,
        example: Any,
        plan: Plan,
        kind: str,
        global_batch: int | None,
        plan_for: PlanFor | None,
    ):
        self.example, self.plan = example, plan
        self.epochs = Epochs(kind, global_batch, self if plan_for is not None else None)
        self._plan_among = plan_for
        self._lock = threading.RLock()

    @property
    def sizes(self) -> set[int]:
        """The possible numbers of samples of a batch; empty if they may change."""
        return set(self.plan.sizes) if self._plan_among is None else set()

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the samples of a step, in the structure of the data."""
        raise NotImplementedError

    def reshard(self, rank: int, size: int) -> None:
        """Distributes the data over other ranks, from the next epoch on."""
        if self._plan_among is not None and (rank, size) != (self.plan.rank, self.plan.size):
            with self._lock:
                self.plan = self._plan_among(rank, size)
                self.epochs.shapes = None  # batches have other sizes
                self._forget()

    def _forget(self) -> None:
        """Drops what was made for the previous plan."""
        raise NotImplementedError


class IndexedBatches(Batches):
    """Batches of samples, which `take` makes of indices; `None`: a loader of torch reads."""

    def __init__(
        self,
        example: Any,
        take: Any,
        plan: Plan,
        order: Callable[[Any, int], np.ndarray],
        kind: str,
        global_batch: int | None = None,
        plan_for: PlanFor | None = None,
    ):
        super().__init__(example, plan, kind, global_batch, plan_for)
        self._take, self._order_of = take, order
        self._known_epoch, self._order = 0, order(plan, 0)

    def batch(self, epoch: int, step: int) -> Any:
        return self._take(self.indices(epoch, step))

    def indices(self, epoch: int, step: int) -> np.ndarray:
        with self._lock:
            if self._known_epoch != epoch:
                self._known_epoch, self._order = epoch, self._order_of(self.plan, epoch)
            return self._order[slice(*self.plan.bounds(step))]

    def _forget(self) -> None:
        self._known_epoch = -1


def for_keras(batches: Batches, ahead: bool = True, settings: Any = None) -> Any:
    """Returns the batches of this rank as data for `fit`, with the workers of `settings`."""
    import keras

    # Keras would turn a `PyDataset` into `Dataset.from_generator`, which sets malloc's trim
    # threshold for the whole process: memory is returned to the kernel after every step and faulted
    # in again. A small dense model took 1.7 times the processor time.
    if keras.config.backend() == "tensorflow" and batches.example is not None:
        from keras_dist.data.tf_pipelines import pipeline_of

        return pipeline_of(batches, ahead)
    from keras_dist.data.array_dataset import ArrayDataset

    return ArrayDataset(batches, settings)
