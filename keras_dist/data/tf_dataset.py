"""Sharding of tf.data pipelines, of samples or of batches.

Every rank reads the whole pipeline exactly once per epoch and keeps its shard. A second pass, for
example for the remainder, would advance the shuffle state of a pipeline and give this rank another
order than the other ranks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist import errors
from keras_dist.data import tf_order
from keras_dist.data.epochs import Epochs
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE, WHOLE
from keras_dist.data.partition import Plan, plan_round_robin
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.tf_order import HeldFiles, held_files, with_own_cache, with_own_caches
from keras_dist.data.tf_pipelines import (
    counted,
    epochs_of,
    in_round_robin,
    shuffled,
    with_remainder,
)

ORDER = (
    "Pass shard() the data before it is shuffled: it shuffles the shard of each rank. Or "
    "shuffle with a fixed seed, the same on all ranks, and keep map() and interleave() "
    "deterministic."
)


class TfSource:
    """A tf.data pipeline, the whole data set on every rank."""

    def __init__(self, dataset: tf.data.Dataset, options: ShardOptions):
        options.refuse("a tf.data.Dataset", {"reader": "Only a list of files has a reader."})
        seeds_given = tf_order.seeds(dataset)
        dataset, options = _of_samples(dataset, options)
        if options.batch_size is None:
            _check_batches(dataset, options)
        self._options = options
        self._total = _length(dataset, options)
        self._dataset = _in_order(dataset, options)
        self._plan: Plan | None = None
        if self._total is not None and options.batch_size is not None:
            self._plan = options.epoch_plan(self._total, options.batch_size)
        elif self._total is not None:
            self._check_batches(self._total)
        self.held = held_files(self._dataset)
        seeds = tf_order.seeds(dataset)
        self.facts = [
            Fact("the kind of data", "a tf.data.Dataset", WHOLE),
            Fact("the number of its elements", self._total, WHOLE),
            Fact("the specification of its elements", repr(dataset.element_spec), WHOLE),
            Fact("the seeds of its shuffles", seeds, ORDER),
            *options.facts(),
        ]
        self.epochs = epochs_of(self.facts, options)
        # Keras draws the seed of a shuffle, and shuffles by it before the pipeline begins.
        replaced = seeds_given[: len(seeds_given) - len(seeds)]
        drawn = [pair for pair in replaced if pair[0] == tf_order.NO_SEED]
        if not options.draws:
            self.facts.append(Fact("the seed of its last shuffle", drawn, ORDER))
        if seeds and self.epochs.not_restored is None:
            self.epochs.not_restored = "a tf.data.Dataset that shuffles before shard() sees it"

    def _check_batches(self, total: int) -> None:
        options = self._options
        if total == 0 or (total < options.size and options.remainder == "drop"):
            options.need_samples(total, "batches")
        if total < options.size and options.remainder == "uneven":
            options.need_samples(int(counted(self._dataset.unbatch())))
        options.need_steps(plan_round_robin(total, options.size, options.remainder).steps)

    def part(self, held: Sequence[HeldFiles]) -> tf.data.Dataset:
        options, total = self._options, self._total
        dataset = with_own_caches(self._dataset, held, options)
        if self._plan is not None:
            return batches_of_samples(dataset, total, self._plan, options, self.epochs)
        if options.batch_size is not None:
            return limited_batches(dataset, options, self.epochs)
        part = dataset.shard(options.size, options.rank)
        if total is None:
            return _first_steps(part, options)
        plan = plan_round_robin(total, options.size, options.remainder)
        if options.steps is not None and options.steps < plan.steps:
            return _with_cardinality(part.take(options.steps), options.steps)
        return _with_cardinality(in_round_robin(dataset, plan, options), plan.steps)


class FileSource:
    """Files of which each rank reads its own; the number of elements may differ by rank."""

    def __init__(self, dataset: tf.data.Dataset, facts: list[Fact], options: ShardOptions):
        self._options = options
        self._dataset = with_own_cache(dataset, options)
        self._count = None if options.steps else count_elements(self._dataset)
        self.held = self._count, held_files(self._dataset, complete=True)
        if self._count is not None and self._count < 0:
            raise errors.DataError(
                "data with an end, or steps",
                "a reader whose tf.data.Dataset has no end",
                "Remove .repeat() from the reader, or pass steps.",
            )
        self.facts = [*facts, *options.facts()]
        self.epochs = epochs_of(self.facts, options)
        self.epochs.global_batch = None  # files are sharded, not samples

    def part(self, held: Sequence[tuple[int | None, Any]]) -> Any:
        """Returns this rank's batches, given the number of elements of each rank."""
        options, batch_size = self._options, self._options.batch_size or DEFAULT_BATCH_SIZE
        dataset = with_own_caches(self._dataset, [files for _, files in held], options)
        counts = [count for count, _ in held if count is not None]
        if self._count is None:
            return limited_batches(dataset, options, self.epochs, whole=False)
        return spread_batches(dataset, options.spread(counts, batch_size), options, self.epochs)


def count_elements(dataset: tf.data.Dataset) -> int:
    """Returns the number of elements, negative if infinite; reads all of them if it is unknown."""
    known = int(dataset.cardinality())
    if known == tf.data.UNKNOWN_CARDINALITY:
        return int(counted(dataset))
    return known


def with_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the pipeline with a known cardinality; reads all elements if it is unknown."""
    return dataset.apply(tf.data.experimental.assert_cardinality(count_elements(dataset)))


def batches_of_samples(
    dataset: tf.data.Dataset, total: int | None, plan: Plan, options: ShardOptions, epochs: Epochs
) -> tf.data.Dataset:
    """Returns the batches of this rank from a pipeline of `total` samples."""
    if options.way is None:
        epochs.samples = functools.partial(plan.order, None, 0)

    def batched(part: tf.data.Dataset) -> tf.data.Dataset:
        if options.draws or options.remainder == "drop":
            return part.batch(plan.batch_size, drop_remainder=True).take(plan.steps)
        batches = part.batch(plan.batch_size)
        is_limited = plan.count < plan.held
        return (batches if is_limited else with_remainder(batches, plan)).take(plan.steps)

    if options.draws:
        batches = shuffled(dataset.repeat(), options, epochs, batched)
    else:
        batches = shuffled(dataset, options, epochs, batched, total, plan.held)
    return _with_cardinality(batches, plan.steps)


def limited_batches(
    dataset: tf.data.Dataset, options: ShardOptions, epochs: Epochs, whole: bool = True
) -> tf.data.Dataset:
    """Returns `options.steps` full batches of a pipeline of unknown length."""
    batch_size = options.batch_size or DEFAULT_BATCH_SIZE
    dataset = dataset.repeat() if options.draws else dataset

    def batched(part: tf.data.Dataset) -> tf.data.Dataset:
        return part.batch(batch_size, drop_remainder=True)

    return _first_steps(shuffled(dataset, options, epochs, batched, whole=whole), options)


def spread_batches(
    part: tf.data.Dataset, plan: Plan, options: ShardOptions, epochs: Epochs
) -> tf.data.Dataset:
    """Returns batches of the planned sizes from the elements of this rank's files."""
    sizes = plan.sizes

    def batched(part: tf.data.Dataset) -> tf.data.Dataset:
        elements = part.repeat() if plan.extra else part
        even = len(set(sizes)) == 1
        batches = elements.take(plan.count).batch(max(sizes), drop_remainder=even)
        return batches.rebatch(sizes) if any(n < max(sizes) for n in sizes[:-1]) else batches

    return _with_cardinality(
        shuffled(part, options, epochs, batched, plan.held, whole=False), plan.steps
    )


# --- Unpacking of shuffle and batch


def _of_samples(
    dataset: tf.data.Dataset, options: ShardOptions
) -> tuple[tf.data.Dataset, ShardOptions]:
    """Returns the pipeline before its final shuffle and batch, and the options they imply."""
    if options.batched is False and options.batch_size is None:
        options = dataclasses.replace(options, batch_size=DEFAULT_BATCH_SIZE)
    samples = options.batch_size is not None and not options.batched
    found = tf_order.shuffled_last(dataset) if options.shuffle is not False else None
    if found is None or (found.batch_size is None) is not samples:
        if options.batched and options.batch_size is not None:
            rows = dataset.unbatch()
            finite = dataset.cardinality() != tf.data.INFINITE_CARDINALITY
            dataset = with_length(rows) if finite and options.steps is None else rows
        return dataset, options
    # The buffer of the whole data set is divided among the ranks.
    buffer = found.buffer if options.shuffle == "global" else -(-found.buffer // options.size)
    return found.source, dataclasses.replace(
        options,
        batch_size=options.batch_size or found.batch_size,
        shuffle_buffer=options.shuffle_buffer or buffer,
        remainder="drop" if found.drops and options.remainder == "uneven" else options.remainder,
    )


# --- Checks


def _check_batches(dataset: tf.data.Dataset, options: ShardOptions) -> None:
    remedy = "To shuffle samples, pass shard() a data set of samples and a batch_size."
    draw_remedy = "To draw samples, pass sample() a data set of samples."
    remedies = {"draws": draw_remedy, "shuffle": remedy, "shuffle_buffer": remedy}
    options.refuse("a tf.data.Dataset of batches", remedies)
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise errors.DataError(
                "a tf.data.Dataset of batches, because no batch_size was passed",
                f"elements of {dataset.element_spec!r}",
                "Pass batch_size, so that shard() makes the batches.",
            )


def _length(dataset: tf.data.Dataset, options: ShardOptions) -> int | None:
    """Returns the number of elements; `None` if it is unknown and `steps` is set."""
    total = int(dataset.cardinality())
    if total >= 0:
        return total
    if options.steps is not None:
        return None
    if total == tf.data.INFINITE_CARDINALITY:
        received, remedy = "an infinite tf.data.Dataset", "Leave out .repeat(), or pass steps."
    else:
        received = "a tf.data.Dataset of unknown length"
        remedy = (
            "Pass steps, the number of batches per epoch on each rank; or set the length: "
            "dataset.apply(tf.data.experimental.assert_cardinality(count))."
        )
    raise errors.DataError("data of a known length, or steps", received, remedy)


def _in_order(dataset: tf.data.Dataset, options: ShardOptions) -> tf.data.Dataset:
    """Returns the pipeline with deterministic order; raises if its order may differ."""
    reason = tf_order.unordered(dataset) if options.size > 1 else None
    if reason is not None:
        raise errors.DataError("a tf.data.Dataset with the same order on all ranks", reason, ORDER)
    if dataset.options().deterministic is False:
        tf_options = tf.data.Options()
        tf_options.deterministic = True
        return dataset.with_options(tf_options)
    return dataset


# --- The end of an epoch


def _first_steps(batches: tf.data.Dataset, options: ShardOptions) -> tf.data.Dataset:
    """Returns the first `options.steps` batches; iteration raises if there are fewer."""
    failure = errors.DataError(
        f"data for steps={options.steps} on each of {options.size} ranks",
        "data that ended earlier",
        "Lower steps, or add .repeat() to the data.",
    )

    def fail(_: tf.Tensor) -> tf.data.Dataset:
        with tf.control_dependencies([tf.debugging.Assert(False, [str(failure)])]):
            return batches.take(0)

    failing = tf.data.Dataset.range(1).flat_map(fail)
    return _with_cardinality(batches.concatenate(failing).take(options.steps), options.steps)


def _with_cardinality(batches: tf.data.Dataset, steps: int | None) -> tf.data.Dataset:
    """Returns the batches with a known cardinality, which Keras reads, prefetched."""
    known = batches.apply(tf.data.experimental.assert_cardinality(steps))
    return known.prefetch(tf.data.AUTOTUNE)
