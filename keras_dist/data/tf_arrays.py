"""This rank's batches as a tf.data pipeline."""

import weakref
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_dist.data.rank_batches import RankBatches

__all__ = ["pipeline_of"]


def pipeline_of(batches: RankBatches, ahead: bool = True) -> tf.data.Dataset:
    """Returns a pipeline of the batches; each iteration over it is the next epoch.

    The batches are gathered by numpy: arrays that lie in a file are read as they are needed,
    and none is copied into TensorFlow as a whole.

    Args:
        batches: those of this rank.
        ahead: whether batches may be made before training asks for them.
    """
    epochs = batches.epochs
    steps = batches.plan.steps
    sizes = batches.sizes
    size = sizes.pop() if len(sizes) == 1 else None
    arrays = tf.nest.flatten(batches.example)
    dtypes = [tf.as_dtype(array.dtype) for array in arrays]

    # TensorFlow keeps such functions as long as the process lives; iterators keep the pipeline.
    held = weakref.ref(batches)

    def gather(epoch: np.int64, step: np.int64) -> Any:
        return tf.nest.flatten(cast(RankBatches, held()).batch(int(epoch), int(step)))

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
    # There is nothing to tune, and TensorFlow's tuner does not always hear that its iterator goes,
    # as at the end of an epoch: then all wait for its next turn, which may be in a minute.
    options.autotune.enabled = False
    if ahead:
        known = known.prefetch(tf.data.AUTOTUNE)
    else:
        # It would prefetch by itself.
        options.experimental_optimization.inject_prefetch = False
    return known.with_options(options)
