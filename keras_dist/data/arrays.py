"""numpy arrays, alone or in tuples, lists and dicts: sample i belongs to rank i % size."""

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from keras_dist import errors
from keras_dist.data.epochs import Epochs
from keras_dist.data.partition import Plan, Rest, plan_for_fewer, plan_samples
from keras_dist.data.terms import Fact, Terms

__all__ = ["ArrayBatches", "ArraySource"]

DEFAULT_BATCH_SIZE = 32

PlanAmong = Callable[[int, int], Plan]  # of a rank and the number of ranks


class ArraySource:
    """Arrays in memory, the whole data set on every rank.

    Args:
        data: array, or nested tuples, lists and dicts of arrays of equal length.
        terms: the terms on which to share it out.

    Raises:
        ArgumentTypeError: something in `data` is not an array.
        DataError: lengths differ, or there are fewer samples than ranks or steps.
    """

    held = None

    def __init__(self, data: Any, terms: Terms):
        terms.refuse(
            "arrays",
            {
                "reader": "Only a list of files has one.",
                "shuffle_buffer": "Arrays are always shuffled completely; leave it out.",
            },
        )
        leaves = list(_leaves(data, "data"))
        total = _common_length(leaves, terms)
        terms.need_samples(total)
        batch_size = terms.batch_size or DEFAULT_BATCH_SIZE
        plan = plan_samples(total, terms.size, terms.rank, batch_size, terms.remainder)
        terms.need_steps(plan.steps)
        plan = plan.limited(terms.steps or plan.steps)
        whole = "Give shard() the same whole data set on every rank: it takes the part itself."
        self.facts = [
            Fact("the kind of data", "arrays", whole),
            Fact("the number of samples", total, whole),
            Fact("the arrays", [_describe(path, array) for path, array in leaves], whole),
            *terms.facts(),
        ]
        kind = repr([fact.value for fact in self.facts]).encode()
        self.batches = ArrayBatches(
            data,
            plan,
            None if terms.shuffle is False else terms.seed,
            hashlib.blake2b(kind, digest_size=8).hexdigest(),
            functools.partial(_plan_among, total, terms, plan.steps) if terms.may_shrink else None,
        )

    def part(self, held: Sequence[int | None]) -> Any:
        """Returns this rank's batches in the form that suits the backend of Keras.

        A `keras.utils.PyDataset` serves all backends, but on TensorFlow Keras turns it into
        `Dataset.from_generator`. That sets malloc's trim threshold for the whole process:
        from then on memory goes back to the kernel between any two steps and is faulted in
        again, which took 1.7 times the processor time of a small dense model.
        """
        import keras

        if keras.config.backend() == "tensorflow":
            from keras_dist.data.tf_arrays import pipeline_of

            return pipeline_of(self.batches)
        from keras_dist.data.array_dataset import ArrayDataset

        return ArrayDataset(self.batches)


class ArrayBatches:
    """One rank's batches of arrays, for any epoch. Holds no copy of the arrays.

    Args:
        data: array, or nested tuples, lists and dicts of arrays, the whole data set.
        plan: this rank's part of it.
        seed: for the order of every epoch; `None` keeps the order of the arrays.
        kind: what the whole data set is, see `Epochs`.
        plan_among: makes the plan of a rank among fewer, of its number and theirs. Defaults to
            none: batches keep their sizes.
    """

    def __init__(
        self,
        data: Any,
        plan: Plan,
        seed: int | None,
        kind: str = "arrays",
        plan_among: PlanAmong | None = None,
    ):
        self.data = _map(lambda array: array, data)
        self.plan = plan
        self.position = (0, 0)
        self.lock = threading.RLock()
        self._plan_among = plan_among
        self.epochs = Epochs(kind, self if plan_among is not None else None)
        self._seed = seed
        self._latest = (0, plan.order(seed, epoch=0))
        self._rest: tuple[int, Rest] | None = None  # of an epoch, by its number

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the samples of a step, in the structure of the data."""
        with self.lock:
            self.position = max(self.position, (epoch, step + 1))
            indices = self._indices(epoch, step)
        return _map(lambda array: np.asarray(array[indices]), self.data)

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
                rest = Rest(rank, size, left, position[1], self.plan.steps)
                self._rest = position[0], rest
            self.plan = self._plan_among(rank, size)
            self._latest = (-1, np.empty(0, np.int64))

    def _left(self, rank: int, epoch: int, step: int) -> np.ndarray:
        """Returns what one of the ranks before, perhaps dead now, has not read of an epoch."""
        if self._rest is not None and self._rest[0] == epoch:
            return dataclasses.replace(self._rest[1], rank=rank).left(step)
        plan = cast(PlanAmong, self._plan_among)(rank, self.plan.size)
        return plan.order(self._seed, epoch)[plan.bounds(step)[0] :]

    def _indices(self, epoch: int, step: int) -> np.ndarray:
        if self._rest is not None and self._rest[0] == epoch:
            return self._rest[1].batch(step)
        start, stop = self.plan.bounds(step)
        return self._order(epoch)[start:stop]

    def _order(self, epoch: int) -> np.ndarray:
        known, order = self._latest
        if known != epoch and (self._seed is not None or known < 0):
            order = self.plan.order(self._seed, epoch)
            self._latest = (epoch, order)
        return order


def _plan_among(total: int, terms: Terms, steps: int, rank: int, size: int) -> Plan:
    """Returns the plan of a rank among so many, of which others may have died."""
    batch_size = terms.batch_size or DEFAULT_BATCH_SIZE
    first_rank = rank if size == terms.size else 0
    first = plan_samples(total, terms.size, first_rank, batch_size, terms.remainder).limited(steps)
    if size == terms.size:
        return first
    return plan_for_fewer(first, total, size, rank, terms.remainder)


def _map(function: Callable[[np.ndarray], Any], data: Any) -> Any:
    """Applies a function to every array. Lists become tuples, as Keras takes a batch."""
    if isinstance(data, dict):
        return {key: _map(function, value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return tuple(_map(function, value) for value in data)
    return function(data)


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays with how a user would write each."""
    if isinstance(data, dict | tuple | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from _leaves(value, f"{path}[{key!r}]")
    else:
        yield path, data


def _common_length(leaves: list[tuple[str, Any]], terms: Terms) -> int:
    for path, array in leaves:
        if not isinstance(array, np.ndarray):
            raise errors.ArgumentTypeError(
                terms.explain(
                    f"{path} to be a numpy array",
                    f"an object of type {type(array).__name__}",
                    "Convert it with numpy.asarray, or give shard() a tf.data.Dataset.",
                )
            )
    lengths = {path: len(array) if array.ndim else None for path, array in leaves}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        described = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise errors.DataError(
            terms.explain(
                "arrays with one entry per sample, all of the same length",
                described.replace("None", "a scalar") or "no array and no file",
                "Cut them to the same first dimension.",
            )
        )
    return next(iter(lengths.values())) or 0


def _describe(path: str, array: np.ndarray) -> str:
    return f"{path}: {array.dtype} {array.shape[1:]}"
