"""tf.data pipelines: of single samples, or of batches made by the user.

Every rank reads the whole pipeline once an epoch and keeps its part. It must be once, also
for a remainder: a second pass over a pipeline that shuffles has another order, and would
shift this rank's order of the next epoch against that of the others.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_dist import errors
from keras_dist.data import tf_order
from keras_dist.data.epochs import Epochs
from keras_dist.data.indexed import DEFAULT_BATCH_SIZE
from keras_dist.data.partition import Plan, Spread, plan_deal, plan_samples
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.tf_remainder import counted, dealt, with_remainder
from keras_dist.data.tf_shuffle import epochs_of, shuffled

__all__ = [
    "TfSource",
    "batches_of_samples",
    "count_elements",
    "limited_batches",
    "spread_batches",
    "with_length",
]

WHOLE = "Give shard() the same whole data set on every rank: it takes the part itself."
ORDER = (
    "Give shard() the data before it is shuffled: it shuffles each rank's part itself. Or "
    "shuffle with the same fixed seed, and keep map() and interleave() deterministic."
)


class TfSource:
    """A tf.data pipeline, the whole data set on every rank.

    Args:
        dataset: of single samples if `terms` has a batch size, else of batches.
        terms: the terms on which to share it out.

    Raises:
        ArgumentError: an argument of `shard` has no meaning here.
        DataError: its length is not known, too small, or its order is not that of the
            other ranks.
    """

    held = None

    def __init__(self, dataset: tf.data.Dataset, terms: ShardOptions):
        terms.refuse("a tf.data.Dataset", {"reader": "Only a list of files has one."})
        dataset, terms = _of_samples(dataset, terms)
        if terms.batch_size is None:
            _check_batches(dataset, terms)
        self._terms = terms
        self._total = _length(dataset, terms)
        self._dataset = _in_order(dataset, terms)
        if self._total is not None:
            self._check_total(self._total)
        seeds = tf_order.seeds(dataset)
        self.facts = [
            Fact("the kind of data", "a tf.data.Dataset", WHOLE),
            Fact("the number of its elements", self._total, WHOLE),
            Fact("what its elements are", repr(dataset.element_spec), WHOLE),
            Fact("the seeds of its shuffles", seeds, ORDER),
            *terms.facts(),
        ]
        self.epochs = epochs_of(self.facts, terms)
        if seeds and self.epochs.forgets is None:
            self.epochs.forgets = "a tf.data.Dataset that shuffles before shard() sees it"

    def _check_total(self, total: int) -> None:
        terms = self._terms
        if terms.batch_size is not None:
            terms.need_samples(total)
            terms.need_steps(_plan(total, terms, terms.batch_size).steps)
            return
        if total == 0 or (total < terms.size and terms.remainder == "drop"):
            terms.need_samples(total, "batches")
        if total < terms.size and terms.remainder == "uneven":
            terms.need_samples(int(counted(self._dataset.unbatch())))
        terms.need_steps(plan_deal(total, terms.size, terms.remainder).steps)

    def part(self, held: Sequence[int | None]) -> tf.data.Dataset:
        """Returns this rank's batches."""
        terms, total = self._terms, self._total
        if terms.batch_size is not None and total is not None:
            return batches_of_samples(self._dataset, total, terms, self.epochs)
        if terms.batch_size is not None:
            return limited_batches(self._dataset, terms, self.epochs)
        part = self._dataset.shard(terms.size, terms.rank)
        if total is None:
            return _ending_after(part, terms)
        deal = plan_deal(total, terms.size, terms.remainder)
        if terms.steps is not None and terms.steps < deal.steps:
            return _finished(part.take(terms.steps), terms.steps)
        return _finished(dealt(self._dataset, deal, terms), deal.steps)


def count_elements(dataset: tf.data.Dataset) -> int:
    """Returns the number of elements, counted by reading them all where it is not known.

    Negative when the pipeline has no end.
    """
    known = int(dataset.cardinality())
    if known == tf.data.UNKNOWN_CARDINALITY:
        return int(counted(dataset))
    return known


def with_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the pipeline with its number of elements known, counted where it was not."""
    return dataset.apply(tf.data.experimental.assert_cardinality(count_elements(dataset)))


def batches_of_samples(
    dataset: tf.data.Dataset, total: int, terms: ShardOptions, epochs: Epochs
) -> tf.data.Dataset:
    """Returns this rank's batches of a pipeline of `total` single samples."""
    batch_size = terms.batch_size or DEFAULT_BATCH_SIZE
    if terms.draws:
        steps = terms.steps or -(-total // (terms.size * batch_size))
        drawn = shuffled(dataset.repeat(), terms, epochs, lambda part: part.batch(batch_size, True))
        return _finished(drawn.take(steps), steps)
    plan = _plan(total, terms, batch_size)
    steps = terms.steps or plan.steps

    def batched(part: tf.data.Dataset) -> tf.data.Dataset:
        if terms.remainder == "drop":
            return part.batch(plan.batch_size, drop_remainder=True).take(steps)
        batches = part.batch(plan.batch_size)
        return (with_remainder(batches, plan) if steps == plan.steps else batches).take(steps)

    return _finished(shuffled(dataset, terms, epochs, batched, total, plan.held), steps)


def limited_batches(
    dataset: tf.data.Dataset, terms: ShardOptions, epochs: Epochs, whole: bool = True
) -> tf.data.Dataset:
    """Returns `terms.steps` full batches of a pipeline whose length is not known.

    Args:
        dataset: the whole of it, or this rank's part.
        terms: the terms on which it is shared out.
        epochs: its epochs.
        whole: which of the two. Defaults to the whole.
    """
    batch_size = terms.batch_size or DEFAULT_BATCH_SIZE

    def batched(part: tf.data.Dataset) -> tf.data.Dataset:
        return part.batch(batch_size, drop_remainder=True)

    return _ending_after(shuffled(dataset, terms, epochs, batched, whole=whole), terms)


def spread_batches(
    part: tf.data.Dataset, held: int, spread: Spread, terms: ShardOptions, epochs: Epochs
) -> tf.data.Dataset:
    """Returns batches of the planned sizes of a part with `held` elements."""
    sizes = spread.sizes

    def batched(part: tf.data.Dataset) -> tf.data.Dataset:
        elements = part.repeat() if spread.count > held else part
        even = len(set(sizes)) == 1
        batches = elements.take(spread.count).batch(max(sizes), drop_remainder=even)
        return batches.rebatch(sizes) if any(n < max(sizes) for n in sizes[:-1]) else batches

    return _finished(shuffled(part, terms, epochs, batched, held, whole=False), len(sizes))


# --- What is told, and what can be seen


def _of_samples(
    dataset: tf.data.Dataset, terms: ShardOptions
) -> tuple[tf.data.Dataset, ShardOptions]:
    """Returns the pipeline before it is shuffled and batched, where that can be seen or told."""
    if terms.batched is False and terms.batch_size is None:
        terms = dataclasses.replace(terms, batch_size=DEFAULT_BATCH_SIZE)
    samples = terms.batch_size is not None and not terms.batched
    seen = tf_order.shuffled_last(dataset) if terms.shuffle is not False else None
    if seen is None or (seen.batch_size is None) is not samples:
        if terms.batched and terms.batch_size is not None:
            rows = dataset.unbatch()
            finite = dataset.cardinality() != tf.data.INFINITE_CARDINALITY
            dataset = with_length(rows) if finite and terms.steps is None else rows
        return dataset, terms
    # What was meant for the whole is the share of a rank.
    buffer = seen.buffer if terms.shuffle == "global" else -(-seen.buffer // terms.size)
    return seen.source, dataclasses.replace(
        terms,
        batch_size=terms.batch_size or seen.batch_size,
        shuffle_buffer=terms.shuffle_buffer or buffer,
        remainder="drop" if seen.drops and terms.remainder == "uneven" else terms.remainder,
    )


# --- Checks


def _check_batches(dataset: tf.data.Dataset, terms: ShardOptions) -> None:
    terms.refuse(
        "a tf.data.Dataset of batches",
        {
            "draws": "To draw samples, give sample() single samples.",
            "shuffle": "To shuffle samples, give shard() single samples and a batch_size.",
            "shuffle_buffer": "To shuffle samples, give shard() single samples and a batch_size.",
        },
    )
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise errors.DataError(
                terms.explain(
                    "a tf.data.Dataset of batches, as no batch_size was given",
                    f"elements of {dataset.element_spec!r}",
                    "Pass batch_size, and shard() makes the batches.",
                )
            )


def _length(dataset: tf.data.Dataset, terms: ShardOptions) -> int | None:
    """Returns the number of elements; `None` when it is not known and `steps` stands in."""
    total = int(dataset.cardinality())
    if total >= 0:
        return total
    if terms.steps is not None:
        return None
    if total == tf.data.INFINITE_CARDINALITY:
        received, remedy = "a tf.data.Dataset without an end", "Leave out .repeat(), or pass steps."
    else:
        received = "a tf.data.Dataset that does not know its length"
        remedy = (
            "Pass steps, the number of batches per epoch on each rank; or tell the length: "
            "dataset.apply(tf.data.experimental.assert_cardinality(count))."
        )
    raise errors.DataError(terms.explain("data of a known length, or steps", received, remedy))


def _in_order(dataset: tf.data.Dataset, terms: ShardOptions) -> tf.data.Dataset:
    """Returns the pipeline with the same order on all ranks."""
    reason = tf_order.unordered(dataset) if terms.size > 1 else None
    if reason is not None:
        raise errors.DataError(
            terms.explain("a tf.data.Dataset with the same order on all ranks", reason, ORDER)
        )
    if dataset.options().deterministic is False:
        options = tf.data.Options()
        options.deterministic = True
        return dataset.with_options(options)
    return dataset


# --- Single samples


def _plan(total: int, terms: ShardOptions, batch_size: int) -> Plan:
    return plan_samples(total, terms.size, terms.rank, batch_size, terms.remainder)


# --- The end of an epoch


def _ending_after(batches: tf.data.Dataset, terms: ShardOptions) -> tf.data.Dataset:
    """Returns the first `terms.steps` batches; iterating raises when there are fewer."""
    text = terms.explain(
        f"data for steps={terms.steps} on each of {terms.size} ranks",
        "data that ended before",
        "Lower steps, or add .repeat() to the data.",
    )

    def fail(_: tf.Tensor) -> tf.data.Dataset:
        with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
            return batches.take(0)

    failing = tf.data.Dataset.range(1).flat_map(fail)
    return _finished(batches.concatenate(failing).take(terms.steps), terms.steps)


def _finished(batches: tf.data.Dataset, steps: int | None) -> tf.data.Dataset:
    """Returns the batches with their number noted, which Keras asks for, made in advance."""
    known = batches.apply(tf.data.experimental.assert_cardinality(steps))
    return known.prefetch(tf.data.AUTOTUNE)
