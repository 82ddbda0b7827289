"""A tf.data pipeline of the batches of a rank."""

import weakref
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_dist.data.rank_batches import RankBatches


def pipeline_of(batches: RankBatches, ahead: bool = True) -> tf.data.Dataset:
    """Returns a pipeline of the batches; each iteration over it is the next epoch.

    Numpy gathers the batches: memory-mapped arrays are read on demand, and no array is copied into
    TensorFlow as a whole.
    """
    epochs = batches.epochs
    steps = batches.plan.steps
    sizes = batches.sizes
    size = sizes.pop() if len(sizes) == 1 else None
    arrays = tf.nest.flatten(batches.example)
    dtypes = [tf.as_dtype(array.dtype) for array in arrays]

    # TensorFlow keeps the functions of `numpy_function` until the process ends.
    reference = weakref.ref(batches)

    def gather(epoch: np.int64, step: np.int64) -> Any:
        return tf.nest.flatten(cast(RankBatches, reference()).batch(int(epoch), int(step)))

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
