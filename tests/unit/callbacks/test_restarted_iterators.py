"""Detection of data that a resumed fit cannot restore."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data import shard
from keras_dist.data.fit_data import restarted

X = np.zeros((8, 2), "float32")


class Plain(keras.utils.PyDataset):
    """Two batches."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:4], X[:4]


class Changing(Plain):
    """Two batches that change in each epoch."""

    def on_epoch_end(self):
        self.epoch = 1


def pipeline():
    return tf.data.Dataset.from_tensor_slices(X)


def noisy(seed=None):
    return pipeline().map(lambda x: x + tf.random.uniform((2,), seed=seed))


def named(x, backend="tensorflow", shuffle=True, steps_per_epoch=None, batch_size=4):
    arguments = {"x": x, "shuffle": shuffle, "steps_per_epoch": steps_per_epoch}
    return restarted({**arguments, "batch_size": batch_size}, backend)


@pytest.fixture(autouse=True)
def no_seed():
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: None, {}, None),
        # Arrays
        (lambda: X, {}, "TensorFlow shuffles arrays without a seed"),
        (lambda: {"a": X}, {"shuffle": "batch"}, "TensorFlow shuffles arrays without a seed"),
        (lambda: X, {"shuffle": False, "steps_per_epoch": 1}, "steps_per_epoch=1"),
        (lambda: X, {"backend": "torch", "steps_per_epoch": 2}, "steps_per_epoch=2"),
        (lambda: X, {"shuffle": False}, None),
        (lambda: X, {"backend": "jax"}, None),
        (lambda: X, {"backend": "torch"}, None),
        (lambda: X, {"shuffle": False, "steps_per_epoch": 2}, None),
        (lambda: X, {"shuffle": False, "steps_per_epoch": 2, "batch_size": None}, None),
        (lambda: [X, X], {"shuffle": False, "steps_per_epoch": 2}, None),
        # tf.data
        (lambda: pipeline().shuffle(8).batch(4), {}, "shuffled without a seed"),
        (lambda: pipeline().shuffle(8, 1).batch(4), {"backend": "jax"}, "reshuffled in each epoch"),
        (lambda: pipeline().batch(4).repeat(), {"steps_per_epoch": 2}, "steps_per_epoch=2"),
        (lambda: noisy().batch(4), {}, "random numbers without a seed"),
        (lambda: pipeline().batch(4), {}, None),
        (lambda: pipeline().batch(4), {"steps_per_epoch": 2}, None),
        (lambda: pipeline().shuffle(8, 1, reshuffle_each_iteration=False).batch(4), {}, None),
        (lambda: noisy(seed=1).batch(4), {}, None),
        # Others
        (lambda: iter([X]), {"steps_per_epoch": 1}, "a generator"),
        (Changing, {}, "on_epoch_end"),
        (lambda: Plain(workers=2), {"backend": "jax"}, "a PyDataset with workers"),
        (lambda: shard(Plain(workers=2, use_multiprocessing=True)), {}, None),
        (Plain, {}, None),
        (lambda: Plain(workers=2), {"shuffle": False}, None),
        (Plain, {"steps_per_epoch": 2}, None),
    ],
)
def test_what_begins_anew_is_named(make, options, words):
    found = named(make(), **options)
    assert len(found) == (words is not None)
    assert all(words in text for text in found)


def test_arrays_with_a_seed_come_in_the_same_order():
    tf.random.set_seed(3)
    assert named(X) == []
