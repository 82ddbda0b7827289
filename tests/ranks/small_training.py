"""Helpers of the training tests: small models, and the same data for any number of ranks."""

import keras
import numpy as np

import keras_dist

FEATURES, CLASSES = 6, 3
BATCH, STEPS = 4, 6
# Options of `compile`: TensorFlow traces for longer than a few steps take.
EAGER = {"run_eagerly": keras.backend.backend() == "tensorflow"}


def make_model(optimizer=None, regularised=False, width=16, **options):
    """A small classifier; the same weights on every rank and every call."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(width, activation="relu")]
    if regularised:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.4)]
    layers += [keras.layers.Dense(CLASSES, activation="softmax")]
    return compiled(keras.Sequential(layers), optimizer, **options)


def distributed(optimizer=None, regularised=False, **options):
    """The same classifier with a distributed optimizer."""
    wrapped = keras_dist.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    return make_model(wrapped, regularised, **options)


def compiled(model, optimizer=None, **options):
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", **options)
    return model


def with_logs(change):
    """A model class whose train step returns its logs changed by `change`."""

    class Custom(keras.Model):
        def train_step(self, *arguments):
            found = super().train_step(*arguments)
            if keras.backend.backend() == "jax":  # a JAX step also returns its new state
                return change(found[0]), found[1]
            return change(found)

    return Custom


def make_data(samples, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, FEATURES)).astype("float32")
    y = (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(axis=1)
    return x, y


def global_data():
    """The data of all ranks: a batch for each rank and step."""
    return make_data(STEPS * BATCH * keras_dist.size())


def rows_of_rank(array, batch):
    """The rows of this rank if each global batch is distributed over the ranks."""
    n = keras_dist.size()
    steps = len(array) // (n * batch)
    dealt = array[: steps * n * batch].reshape(steps, n, batch, *array.shape[1:])
    return np.concatenate(dealt[:, keras_dist.rank()])


def fit_rows(model, x, y):
    """Trains for an epoch on the rows of `rows_of_rank`."""
    callbacks = keras_dist.callbacks()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)


def weights_of(model):
    return [np.array(weight) for weight in model.get_weights()]


def assert_close(weights, expected, relative=1e-6):
    """Compares the weights of a model to a tolerance relative to their norm.

    The tolerance of a single variable is ten times as large: the rounding errors of the steps may
    be large relative to a bias near 0.
    """
    for value, wanted in zip(weights, expected, strict=True):
        near = 10 * relative * np.abs(wanted).max()
        np.testing.assert_allclose(value, wanted, rtol=0, atol=near)
    value, wanted = (np.concatenate([w.ravel() for w in ws]) for ws in (weights, expected))
    assert np.linalg.norm(value - wanted) <= relative * np.linalg.norm(wanted)


def agreed(value):
    """Returns whether a value is equal on all ranks."""
    return len({repr(other) for other in keras_dist.allgather_object(value)}) == 1
