"""What the training tests share: small models, the same data cut for any number of ranks."""

import keras
import numpy as np

import keras_dist

FEATURES, CLASSES = 6, 3
BATCH, STEPS = 4, 6


def make_model(optimizer=None, regularised=False, **options):
    """A small classifier; the same weights on every rank and every call."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(16, activation="relu")]
    if regularised:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.4)]
    layers += [keras.layers.Dense(CLASSES, activation="softmax")]
    return compiled(keras.Sequential(layers), optimizer, **options)


def distributed(optimizer=None, **options):
    """The same classifier, with an optimizer that is distributed."""
    wrapped = keras_dist.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    return make_model(optimizer=wrapped, **options)


def compiled(model, optimizer=None, **options):
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", **options)
    return model


def with_logs(change):
    """A class of models whose train step returns what `change` makes of its logs."""

    class Custom(keras.Model):
        def train_step(self, *arguments):
            found = super().train_step(*arguments)
            if keras.backend.backend() == "jax":  # a step of JAX gives its new state as well
                return change(found[0]), found[1]
            return change(found)

    return Custom


def make_data(samples, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, FEATURES)).astype("float32")
    y = (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(axis=1)
    return x, y


def global_data():
    """The data of all ranks together: so many steps of a batch on each."""
    return make_data(STEPS * BATCH * keras_dist.size())


def rows_of_rank(array, batch):
    """The rows that this rank takes when each global batch is dealt out over the ranks."""
    n = keras_dist.size()
    steps = len(array) // (n * batch)
    dealt = array[: steps * n * batch].reshape(steps, n, batch, *array.shape[1:])
    return np.concatenate(dealt[:, keras_dist.rank()])


def fit_rows(model, x, y):
    """Trains for an epoch on what `rows_of_rank` gives."""
    callbacks = keras_dist.callbacks()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)


def weights_of(model):
    return [np.array(weight) for weight in model.get_weights()]


def assert_close(weights, expected, relative=1e-6):
    """Compares the weights of a model to a tolerance relative to their norm.

    Each variable for itself has to hold ten times that: a bias that has gone up and down
    near 0 is small beside the rounding of the steps that it has made.
    """
    for value, wanted in zip(weights, expected, strict=True):
        near = 10 * relative * np.abs(wanted).max()
        np.testing.assert_allclose(value, wanted, rtol=0, atol=near)
    value, wanted = (np.concatenate([w.ravel() for w in ws]) for ws in (weights, expected))
    assert np.linalg.norm(value - wanted) <= relative * np.linalg.norm(wanted)


def agreed(value):
    """Returns whether a value is equal on all ranks."""
    return len({repr(other) for other in keras_dist.allgather_object(value)}) == 1
