"""tf.data pipelines: of single samples, or of batches made by the user.

Every rank reads the whole pipeline once an epoch and keeps its part. It must be once, also
for a remainder: a second pass over a pipeline that shuffles has another order, and would
shift this rank's order of the next epoch against that of the others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import errors
from keras_dist.data import tf_order
from keras_dist.data.partition import Deal, Plan, Spread, plan_deal, plan_samples
from keras_dist.data.terms import Fact, Terms

__all__ = [
    "TfSource",
    "batches_of_samples",
    "count_elements",
    "limited_batches",
    "spread_batches",
    "with_length",
]

BUFFER_NBYTES = 256 << 20
BUFFER_COUNT = 1 << 16
SAMPLE_NBYTES = 256 << 10  # assumed of samples whose shape is not known

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

    def __init__(self, dataset: tf.data.Dataset, terms: Terms):
        terms.refuse("a tf.data.Dataset", {"reader": "Only a list of files has one."})
        if terms.batch_size is None:
            _check_batches(dataset, terms)
        self._terms = terms
        self._total = _length(dataset, terms)
        self._dataset = _in_order(dataset, terms)
        if self._total is not None:
            self._check_total(self._total)
        self.facts = [
            Fact("the kind of data", "a tf.data.Dataset", WHOLE),
            Fact("the number of its elements", self._total, WHOLE),
            Fact("what its elements are", repr(dataset.element_spec), WHOLE),
            Fact("the seeds of its shuffles", tf_order.seeds(dataset), ORDER),
            *terms.facts(),
        ]

    def _check_total(self, total: int) -> None:
        terms = self._terms
        if terms.batch_size is not None:
            terms.need_samples(total)
            terms.need_steps(_plan(total, terms, terms.batch_size).steps)
            return
        if total == 0 or (total < terms.size and terms.remainder == "drop"):
            terms.need_samples(total, "batches")
        if total < terms.size and terms.remainder == "uneven":
            terms.need_samples(int(_counted(self._dataset.unbatch())))
        terms.need_steps(plan_deal(total, terms.size, terms.remainder).steps)

    def part(self, held: Sequence[int | None]) -> tf.data.Dataset:
        """Returns this rank's batches."""
        terms, total = self._terms, self._total
        if terms.batch_size is not None and total is not None:
            return batches_of_samples(self._dataset, total, terms, terms.batch_size)
        part = self._dataset.shard(terms.size, terms.rank)
        if terms.batch_size is not None:
            return limited_batches(part, terms, terms.batch_size)
        if total is None:
            return _ending_after(part, terms)
        deal = plan_deal(total, terms.size, terms.remainder)
        if terms.steps is not None and terms.steps < deal.steps:
            return _finished(part.take(terms.steps), terms.steps)
        return _finished(_dealt(self._dataset, deal, terms), deal.steps)


def count_elements(dataset: tf.data.Dataset) -> int:
    """Returns the number of elements, counted by reading them all where it is not known.

    Negative when the pipeline has no end.
    """
    known = int(dataset.cardinality())
    if known == tf.data.UNKNOWN_CARDINALITY:
        return int(_counted(dataset))
    return known


def with_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the pipeline with its number of elements known, counted where it was not."""
    return dataset.apply(tf.data.experimental.assert_cardinality(count_elements(dataset)))


def batches_of_samples(
    dataset: tf.data.Dataset, total: int, terms: Terms, batch_size: int
) -> tf.data.Dataset:
    """Returns this rank's batches of a pipeline of `total` single samples."""
    plan = _plan(total, terms, batch_size)
    steps = terms.steps or plan.steps
    part = dataset.shard(terms.size, terms.rank).take(plan.held)
    part = _shuffled(part, plan.held, terms)
    if terms.remainder == "drop":
        return _finished(part.batch(plan.batch_size, drop_remainder=True).take(steps), steps)
    batches = part.batch(plan.batch_size)
    if steps == plan.steps:
        batches = _with_remainder(batches, plan)
    return _finished(batches.take(steps), steps)


def limited_batches(part: tf.data.Dataset, terms: Terms, batch_size: int) -> tf.data.Dataset:
    """Returns `terms.steps` full batches of a part whose length is not known."""
    part = _shuffled(part, None, terms)
    return _ending_after(part.batch(batch_size, drop_remainder=True), terms)


def spread_batches(part: tf.data.Dataset, held: int, spread: Spread, terms: Terms) -> Any:
    """Returns batches of the planned sizes of a part with `held` elements."""
    part = _shuffled(part, held, terms)
    if spread.count > held:
        part = part.repeat()
    sizes = spread.sizes
    batches = part.take(spread.count).batch(max(sizes), drop_remainder=len(set(sizes)) == 1)
    if any(size < max(sizes) for size in sizes[:-1]):
        batches = batches.rebatch(sizes)
    return _finished(batches, len(sizes))


# --- Checks


def _check_batches(dataset: tf.data.Dataset, terms: Terms) -> None:
    terms.refuse(
        "a tf.data.Dataset of batches",
        {
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


def _length(dataset: tf.data.Dataset, terms: Terms) -> int | None:
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


def _counted(dataset: tf.data.Dataset) -> tf.Tensor:
    return dataset.reduce(np.int64(0), lambda count, *_: count + 1)


def _in_order(dataset: tf.data.Dataset, terms: Terms) -> tf.data.Dataset:
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


def _plan(total: int, terms: Terms, batch_size: int) -> Plan:
    return plan_samples(total, terms.size, terms.rank, batch_size, terms.remainder)


def _shuffled(part: tf.data.Dataset, held: int | None, terms: Terms) -> tf.data.Dataset:
    if terms.shuffle is False:
        return part
    buffer = terms.shuffle_buffer or _buffer_count(part.element_spec)
    seed = int(np.random.SeedSequence([terms.seed, terms.rank]).generate_state(1)[0]) | 1
    return part.shuffle(min(buffer, held or buffer), seed=seed, reshuffle_each_iteration=True)


def _buffer_count(element_spec: Any) -> int:
    """Returns how many samples to shuffle among: as many as fit into the memory for it."""
    nbytes = sum(map(_nbytes, tf.nest.flatten(element_spec)))
    return max(1, min(BUFFER_COUNT, BUFFER_NBYTES // max(1, nbytes)))


def _nbytes(spec: Any) -> int:
    if isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() and spec.dtype.size:
        return int(spec.shape.num_elements()) * int(spec.dtype.size)
    return SAMPLE_NBYTES


def _with_remainder(batches: tf.data.Dataset, plan: Plan) -> tf.data.Dataset:
    """Returns batches of the planned sizes, from the plain batches of all samples held."""
    if plan.extra:
        last = -(-plan.held // plan.batch_size) - 1
        batches = batches.enumerate().map(
            lambda index, batch: tf.cond(index == last, lambda: _longer(batch), lambda: batch)
        )
    longer_than_planned = plan.held > plan.steps * plan.batch_size
    begins_another_batch = plan.extra > 0 and plan.held % plan.batch_size == 0
    if longer_than_planned or begins_another_batch:
        batches = batches.rebatch(plan.sizes())
    return batches


def _longer(batch: Any) -> Any:
    """Returns a batch with its first sample once more at the end."""
    return tf.nest.map_structure(_with_first_again, batch)


def _with_first_again(rows: Any) -> Any:
    if isinstance(rows, tf.SparseTensor):
        start = tf.zeros_like(rows.dense_shape)
        first = tf.concat([[1], rows.dense_shape[1:]], axis=0)
        return tf.sparse.concat(0, [rows, tf.sparse.slice(rows, start, first)])
    return tf.concat([rows, rows[:1]], axis=0)


# --- Batches made by the user


def _dealt(dataset: tf.data.Dataset, deal: Deal, terms: Terms) -> tf.data.Dataset:
    """Returns this rank's batches; the last step is made of what does not come out even.

    A window of batches for each step: a round, and under the last one the pool as well.
    """
    if deal.pooled == deal.lent == 0:
        return dataset.take(deal.dealt).shard(terms.size, terms.rank)
    width = deal.pooled or terms.size
    windows = dataset.window(width, shift=terms.size, drop_remainder=deal.pooled > 0)

    def hand_out(step: tf.Tensor, window: Any) -> tf.data.Dataset:
        batches = tf.data.Dataset.zip(window)
        is_last = step == deal.steps - 1
        if deal.lent:
            return batches.skip(_either(is_last, terms.rank % deal.lent, terms.rank)).take(1)
        whole = batches.skip(terms.rank).take(_either(is_last, 0, 1))
        return whole.concatenate(_share_of_rows(batches, is_last, terms))

    return windows.enumerate().flat_map(hand_out)


def _share_of_rows(batches: tf.data.Dataset, wanted: tf.Tensor, terms: Terms) -> tf.data.Dataset:
    """Returns one batch of this rank's even share of the rows; none unless it is wanted."""
    rows = batches.unbatch()
    count = tf.cond(wanted, lambda: _counted(rows), lambda: np.int64(0))
    start, stop = count * terms.rank // terms.size, count * (terms.rank + 1) // terms.size
    return rows.skip(start).take(stop - start).batch(tf.maximum(stop - start, 1))


def _either(condition: tf.Tensor, count: int, otherwise: int) -> tf.Tensor:
    return tf.where(condition, np.int64(count), np.int64(otherwise))


# --- The end of an epoch


def _ending_after(batches: tf.data.Dataset, terms: Terms) -> tf.data.Dataset:
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
