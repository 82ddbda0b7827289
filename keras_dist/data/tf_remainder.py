"""What does not come out even in tf.data: last batches of samples, the last round of batches."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.data.partition import Deal, Plan
from keras_dist.data.shard_options import ShardOptions

__all__ = ["counted", "dealt", "with_remainder"]


def counted(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the number of elements, counted by reading them all."""
    return dataset.reduce(np.int64(0), lambda count, *_: count + 1)


# --- Single samples


def with_remainder(batches: tf.data.Dataset, plan: Plan) -> tf.data.Dataset:
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


def dealt(dataset: tf.data.Dataset, deal: Deal, options: ShardOptions) -> tf.data.Dataset:
    """Returns this rank's batches; the last step is made of what does not come out even.

    A window of batches for each step: a round, and under the last one the pool as well.
    """
    if deal.pooled == deal.lent == 0:
        return dataset.take(deal.dealt).shard(options.size, options.rank)
    width = deal.pooled or options.size
    windows = dataset.window(width, shift=options.size, drop_remainder=deal.pooled > 0)

    def hand_out(step: tf.Tensor, window: Any) -> tf.data.Dataset:
        batches = tf.data.Dataset.zip(window)
        is_last = step == deal.steps - 1
        if deal.lent:
            return batches.skip(_either(is_last, options.rank % deal.lent, options.rank)).take(1)
        whole = batches.skip(options.rank).take(_either(is_last, 0, 1))
        return whole.concatenate(_share_of_rows(batches, is_last, options))

    return windows.enumerate().flat_map(hand_out)


def _share_of_rows(
    batches: tf.data.Dataset, wanted: tf.Tensor, options: ShardOptions
) -> tf.data.Dataset:
    """Returns one batch of this rank's even share of the rows; none unless it is wanted."""
    rows = batches.unbatch()
    count = tf.cond(wanted, lambda: counted(rows), lambda: np.int64(0))
    start, stop = count * options.rank // options.size, count * (options.rank + 1) // options.size
    return rows.skip(start).take(stop - start).batch(tf.maximum(stop - start, 1))


def _either(condition: tf.Tensor, count: int, otherwise: int) -> tf.Tensor:
    return tf.where(condition, np.int64(count), np.int64(otherwise))
