"""Stages of the tf.data pipelines of a rank: order, remainder, and batches that numpy gathers.

Pipelines are shuffled in an order that is a function of the seed and the epoch: the state of
tf.data's reshuffling cannot be saved, so a resumed run would restart it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.partition import Plan, RoundRobin
from keras_dist.data.shard_options import Fact, ShardOptions

BUFFER_NBYTES = 256 << 20
BUFFER_COUNT = 1 << 16
SAMPLE_NBYTES = 256 << 10  # assumed for samples of unknown shape


def epochs_of(facts: Sequence[Fact], options: ShardOptions) -> Epochs:
    """Returns the epochs of a pipeline that is sharded with these options."""
    independent = options.way in (None, "global") and options.batch_size is not None
    global_batch = (options.batch_size or 1) * options.size if independent else None
    return Epochs(kind_of(options.lasting(facts)), global_batch)


def shuffled(
    dataset: tf.data.Dataset,
    options: ShardOptions,
    epochs: Epochs,
    batched: Callable[[tf.data.Dataset], tf.data.Dataset],
    total: int | None = None,
    held: int | None = None,
    whole: bool = True,
) -> tf.data.Dataset:
    """Returns the batches of this rank; each iteration over them is the next epoch."""
    of_all = whole and options.way in ("global", "draw")

    def mine(samples: tf.data.Dataset) -> tf.data.Dataset:
        if not whole or options.way == "draw" or (options.size == 1 and held in (None, total)):
            return samples
        share = samples.shard(options.size, options.rank)
        return share if held is None else share.take(held)

    if options.way is None:
        return batched(mine(dataset))
    buffer = options.shuffle_buffer or _buffer_count(dataset.element_spec)
    count = total if of_all or held is None else held
    buffer = min(buffer, count or buffer)
    key = [options.seed] if options.way == "global" and whole else [options.seed, options.rank]

    def begin(_: tf.Tensor) -> tf.Tensor:
        seed = tf.numpy_function(lambda: _seed([*key, epochs.advance()]), [], tf.int64)
        return tf.ensure_shape(seed, ())

    def of_epoch(seed: tf.Tensor) -> tf.data.Dataset:
        tf.random.set_seed(1)  # affects only this function; the user's seed would change the order
        if of_all:
            return batched(mine(dataset.shuffle(buffer, seed)))
        return batched(mine(dataset).shuffle(buffer, seed))

    # TensorFlow ignores the options of a pipeline inside a function.
    epoch = tf.data.Dataset.range(1).map(begin).flat_map(of_epoch)
    return epoch.with_options(dataset.options())


def _seed(key: Sequence[int]) -> np.int64:
    return np.int64(np.random.SeedSequence(key).generate_state(1)[0])


def _buffer_count(element_spec: Any) -> int:
    """Returns the buffer size in samples, limited by `BUFFER_NBYTES`."""
    nbytes = sum(map(_nbytes, tf.nest.flatten(element_spec)))
    return max(1, min(BUFFER_COUNT, BUFFER_NBYTES // max(1, nbytes)))


def _nbytes(spec: Any) -> int:
    if isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() and spec.dtype.size:
        return int(spec.shape.num_elements()) * int(spec.dtype.size)
    return SAMPLE_NBYTES


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
        batches = batches.rebatch(plan.sizes)
    return batches


def _longer(batch: Any) -> Any:
    """Returns a batch with its first sample repeated at the end."""

    def longer(rows: Any) -> Any:
        if isinstance(rows, tf.SparseTensor):
            start = tf.zeros_like(rows.dense_shape)
            first = tf.concat([[1], rows.dense_shape[1:]], axis=0)
            return tf.sparse.concat(0, [rows, tf.sparse.slice(rows, start, first)])
        return tf.concat([rows, rows[:1]], axis=0)

    return tf.nest.map_structure(longer, batch)


# --- Batches made by the user


def in_round_robin(
    dataset: tf.data.Dataset, plan: RoundRobin, options: ShardOptions
) -> tf.data.Dataset:
    """Returns the batches of this rank; the last step has the remainder."""
    if plan.pooled == plan.repeated == 0:
        return dataset.take(plan.full).shard(options.size, options.rank)
    width = plan.pooled or options.size
    # A window has the batches of a step: one per rank, and in the last step also the pooled ones.
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


# --- Data with random access


def pipeline_of(batches: Any, ahead: bool = True) -> tf.data.Dataset:
    """Returns a pipeline of `indexed.Batches`; each iteration over it is the next epoch."""
    # Numpy gathers the batches: memory-mapped arrays are read on demand, and no array is copied
    # into TensorFlow as a whole.
    epochs = batches.epochs
    steps = batches.plan.steps
    sizes = batches.sizes
    size = sizes.pop() if len(sizes) == 1 else None
    arrays = tf.nest.flatten(batches.example)
    dtypes = [tf.as_dtype(array.dtype) for array in arrays]

    # TensorFlow keeps the functions of `numpy_function` until the process ends.
    reference = weakref.ref(batches)

    def gather(epoch: np.int64, step: np.int64) -> Any:
        return tf.nest.flatten(cast(Any, reference()).batch(int(epoch), int(step)))

    def load(epoch: tf.Tensor, step: tf.Tensor) -> Any:
        tensors = tf.numpy_function(gather, [epoch, step], dtypes)
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.set_shape((size, *array.shape[1:]))
        return tf.nest.pack_sequence_as(batches.example, tensors)

    def begin(_: tf.Tensor) -> tf.Tensor:
        epoch = tf.numpy_function(lambda: np.int64(epochs.advance()), [], tf.int64)
        return tf.ensure_shape(epoch, ())

    def steps_of(epoch: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(steps).map(lambda step: (epoch, step))

    numbered = tf.data.Dataset.range(1).map(begin).flat_map(steps_of)
    loaded = numbered.map(load)
    loaded.batches = batches
    known = loaded.apply(tf.data.experimental.assert_cardinality(steps))
    options = tf.data.Options()
    # Destroying an iterator joins its tuner thread, which may miss the cancellation and sleep for
    # up to a minute. There is nothing to tune here.
    options.autotune.enabled = False
    if ahead:
        known = known.prefetch(tf.data.AUTOTUNE)
    else:
        # TensorFlow prefetches by default.
        options.experimental_optimization.inject_prefetch = False
    return known.with_options(options)
