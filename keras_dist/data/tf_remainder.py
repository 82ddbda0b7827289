"""The remainder of a tf.data pipeline: last batches of samples, last round of batches."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.data.partition import Plan
from keras_dist.data.round_robin import RoundRobin
from keras_dist.data.shard_options import ShardOptions


def counted(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the number of elements; reads all of them."""
    return dataset.reduce(np.int64(0), lambda count, *_: count + 1)


# --- Samples


def with_remainder(batches: tf.data.Dataset, plan: Plan) -> tf.data.Dataset:
    """Returns batches of the planned sizes from batches of all samples of the shard."""
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
    """Returns a batch with its first sample repeated at the end."""
    return tf.nest.map_structure(_with_first_again, batch)


def _with_first_again(rows: Any) -> Any:
    if isinstance(rows, tf.SparseTensor):
        start = tf.zeros_like(rows.dense_shape)
        first = tf.concat([[1], rows.dense_shape[1:]], axis=0)
        return tf.sparse.concat(0, [rows, tf.sparse.slice(rows, start, first)])
    return tf.concat([rows, rows[:1]], axis=0)


# --- Batches made by the user


def in_round_robin(
    dataset: tf.data.Dataset, plan: RoundRobin, options: ShardOptions
) -> tf.data.Dataset:
    """Returns the batches of this rank; the last step has the remainder.

    A window has the batches of a step: one per rank, and in the last step also the pooled ones.
    """
    if plan.pooled == plan.repeated == 0:
        return dataset.take(plan.full).shard(options.size, options.rank)
    width = plan.pooled or options.size
    windows = dataset.window(width, shift=options.size, drop_remainder=plan.pooled > 0)

    def select(step: tf.Tensor, window: Any) -> tf.data.Dataset:
        batches = tf.data.Dataset.zip(window)
        is_last = step == plan.steps - 1
        if plan.repeated:
            return batches.skip(_select(is_last, options.rank % plan.repeated, options.rank)).take(
                1
            )
        whole = batches.skip(options.rank).take(_select(is_last, 0, 1))
        return whole.concatenate(_portion_of_rows(batches, is_last, options))

    return windows.enumerate().flat_map(select)


def _portion_of_rows(
    batches: tf.data.Dataset, wanted: tf.Tensor, options: ShardOptions
) -> tf.data.Dataset:
    """Returns a batch of an even share of the rows for this rank; none unless `wanted`."""
    rows = batches.unbatch()
    count = tf.cond(wanted, lambda: counted(rows), lambda: np.int64(0))
    start, stop = count * options.rank // options.size, count * (options.rank + 1) // options.size
    return rows.skip(start).take(stop - start).batch(tf.maximum(stop - start, 1))


def _select(condition: tf.Tensor, count: int, otherwise: int) -> tf.Tensor:
    return tf.where(condition, np.int64(count), np.int64(otherwise))
