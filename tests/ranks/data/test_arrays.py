"""`shard` of arrays gives a step what `fit` of the same arrays gives it in one process."""

import collections
import time

import keras
import ml_dtypes
import numpy as np
import pytest

import keras_dist
from keras_dist.data import shard

pytestmark = pytest.mark.jobs("tensorflow-2", "jax-2", "torch-2")

SAMPLES = 12
Pair = collections.namedtuple("Pair", "left right")


class Seeing(keras.Model):
    """A model that notes what its step is given."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.seen = set()

    def call(self, x):
        x = keras.ops.concatenate([x.left, x.right], -1) if isinstance(x, Pair) else x
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        leaves = keras.tree.flatten((x, y, sample_weight))
        self.seen.add((type(x), *(keras.backend.standardize_dtype(leaf.dtype) for leaf in leaves)))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def trained(optimizer, fit):
    """Returns the weights of a model after `fit`, and what its step was given."""
    model = Seeing()
    model.compile(optimizer, "mse")
    fit(model)
    kinds = {(Pair if kind is Pair else "an array", *dtypes) for kind, *dtypes in model.seen}
    return model.get_weights(), kinds


def as_one_process(x, y, weights):
    """Checks that a shard trains as the arrays do in one process."""
    batch = 2 * keras_dist.size()
    plain = {"batch_size": batch, "epochs": 2, "shuffle": False, "verbose": 0}
    expected, kinds = trained(
        keras.optimizers.SGD(0.1), lambda model: model.fit(x, y, sample_weight=weights, **plain)
    )
    part = shard((x, y, weights), 2, shuffle=False)
    found, found_kinds = trained(
        keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        lambda model: model.fit(part, epochs=2, verbose=0, callbacks=keras_dist.callbacks()),
    )
    assert found_kinds == kinds
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def drawn():
    generator = np.random.default_rng(1)
    x = generator.standard_normal((SAMPLES, 3))
    return x, x[:, :1] + 1, generator.uniform(0.5, 2, SAMPLES)


def test_floats_of_other_widths_become_floatx_in_a_named_tuple_that_stays():
    x, y, weights = drawn()
    pair = Pair(x[:, :1].astype("float16"), x[:, 1:].astype(">f8"))
    as_one_process(pair, y.astype(ml_dtypes.bfloat16), weights)


def test_integers_and_booleans_stay():
    x, y, weights = drawn()
    as_one_process((10 * x).astype("int8"), y > 1, weights)


class Slow(keras.utils.PyDataset):
    """Batches of `count` samples, of which every other step takes longer to read."""

    def __init__(self, count, **options):
        super().__init__(**options)
        self.count = count

    def __len__(self):
        return 8 * keras_dist.size() // self.count

    def __getitem__(self, index):
        numbers = np.arange(index * self.count, (index + 1) * self.count)
        time.sleep(0.05 * (numbers[0] // keras_dist.size() % 2 == 0))
        return 1 + numbers[:, None].astype("float32") / 8, np.ones((self.count, 1), "float32")


def test_workers_read_batches_in_their_order():
    def weights(optimizer, dataset, **options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        model.fit(dataset, epochs=2, verbose=0, **options)
        return model.get_weights()

    wrapped = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.05))
    sharded = shard(Slow(1, workers=3), shuffle=False)
    found = weights(wrapped, sharded, callbacks=keras_dist.callbacks())
    plain = Slow(keras_dist.size())  # with workers, Keras begins with others on JAX and torch
    expected = weights(keras.optimizers.SGD(0.05), plain, shuffle=False)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 8 * keras_dist.size()

    def __getitem__(self, index):
        return np.ones((1, 1), "float32"), np.full((1, 1), index, "float32")

    def on_epoch_begin(self):
        self.hooks = [*vars(self).get("hooks", []), "begin"]

    def on_epoch_end(self):
        self.hooks = [*vars(self).get("hooks", []), "end"]


@pytest.mark.parametrize("is_built", [False, True])
def test_workers_read_each_batch_once_in_an_epoch(is_built):
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
    if is_built:
        model.build((None, 1))
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mae")
    numbered = Numbered(workers=2, max_queue_size=2)
    data = shard(numbered)
    fitted = model.fit(data, epochs=2, verbose=0, callbacks=keras_dist.callbacks())
    assert fitted.history["loss"] == [np.mean(range(8 * keras_dist.size()))] * 2
    if keras.backend.backend() != "tensorflow" and not is_built:
        # Keras reads a batch for its shapes, as the first of an epoch of its own.
        assert numbered.hooks == ["begin", "end"] * 3
    model.compile(loss="mae")  # again, which Keras builds from a batch
    found = model.evaluate(data, verbose=0, callbacks=keras_dist.callbacks())
    assert found == np.mean(range(8 * keras_dist.size()))
