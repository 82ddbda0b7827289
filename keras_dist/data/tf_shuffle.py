"""Shuffling of tf.data pipelines in an order that is a function of the seed and the epoch.

The state of tf.data's reshuffling cannot be saved, so a resumed run would restart it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.data.epochs import Epochs, kind_of
from keras_dist.data.shard_options import Fact, ShardOptions

BUFFER_NBYTES = 256 << 20
BUFFER_COUNT = 1 << 16
SAMPLE_NBYTES = 256 << 10  # assumed for samples of unknown shape


def epochs_of(facts: Sequence[Fact], options: ShardOptions) -> Epochs:
    """Returns the epochs of a pipeline that is sharded with these options."""
    epochs = Epochs(kind_of(options.lasting(facts)))
    if options.way in (None, "global") and options.batch_size is not None:
        epochs.global_batch = options.batch_size * options.size
    return epochs


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
