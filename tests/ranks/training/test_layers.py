"""`SyncBatchNormalization` on n ranks is `BatchNormalization` on all rows; see test_exactness."""

import keras
import numpy as np
import pytest
from small_training import (
    CLASSES,
    FEATURES,
    assert_close,
    compiled,
    make_data,
    rows_of_rank,
    weights_of,
)

import keras_dist
from keras_dist import errors

pytestmark = pytest.mark.jobs("hooks", "jax-2")
in_gpu_memory = pytest.mark.jobs("double")

BATCH, STEPS = 4, 3
BACKEND = keras.backend.backend()
Sync = keras_dist.layers.SyncBatchNormalization
Plain = keras.layers.BatchNormalization


def classifier(normalization, optimizer=None):
    """Returns a model that normalizes its activations."""
    layers = [keras.Input((FEATURES,)), normalization(momentum=0.5)]
    layers += [keras.layers.Dense(CLASSES, activation="softmax")]
    return compiled(keras.Sequential(layers), optimizer)


def of_sequences(normalization, is_masked, optimizer):
    """Returns a model that normalizes sequences, whose rows of 0 may be masked."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((None, FEATURES)),
        *[keras.layers.Masking()] * is_masked,
        normalization(),
        keras.layers.Dense(4, activation="tanh"),
        normalization(),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
    return compiled(keras.Sequential(layers), optimizer)


@in_gpu_memory
@pytest.mark.skipif(BACKEND == "jax", reason="refused in words")
def test_the_gradient_of_a_penalty_equals_that_of_one_process():
    x, _ = make_data(BATCH * keras_dist.size())
    rows, weights = rows_of_rank(x, BATCH), np.cos(np.arange(x.size)).astype("float32")
    weights = weights.reshape(x.shape)
    found = penalty_gradient(Sync(), rows, rows_of_rank(weights, BATCH))
    wanted = penalty_gradient(Plain(), x, weights)
    np.testing.assert_allclose(found, rows_of_rank(wanted, BATCH), rtol=1e-3, atol=1e-4)


def penalty_gradient(layer, x, weights):
    """Returns the gradient, by the rows, of the squared gradient of a loss."""
    if BACKEND == "torch":
        import torch

        x, weights = torch.tensor(x, requires_grad=True), torch.tensor(weights)
        total = (layer(x, training=True) ** 3 * weights).sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return torch.autograd.grad((slope**2).sum(), x)[0].numpy()
    import tensorflow as tf

    x = tf.constant(x)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(layer(x, training=True) ** 3 * weights)
        penalty = tf.reduce_sum(tape.gradient(total, x) ** 2)
    return outer.gradient(penalty, x).numpy()


@in_gpu_memory
def test_a_large_mean_keeps_the_digits_of_the_variance():
    x, _ = make_data(BATCH * keras_dist.size())
    x += np.float32(3000)
    exact = (x - x.mean(0, dtype="float64")) / np.sqrt(x.var(0, dtype="float64") + 1e-3)
    found = keras.ops.convert_to_numpy(Sync()(rows_of_rank(x, BATCH), training=True))
    np.testing.assert_allclose(found, rows_of_rank(exact, BATCH), rtol=0, atol=5e-3)


@pytest.mark.jobs("torch-3")
@pytest.mark.parity("`SyncBatchNormalization` leaves out masked samples")
@pytest.mark.parametrize("is_masked", [pytest.param(True, marks=in_gpu_memory), False])
def test_weights_after_sequences_equal_those_of_one_process(is_masked):
    n = keras_dist.size()
    rng = np.random.default_rng(0)
    x = 3 + rng.standard_normal((BATCH * STEPS * n, 5, FEATURES)).astype("float32")
    for row, length in enumerate(rng.integers(1, 6, len(x))):
        x[row, length:] = 0
    y = rng.integers(0, CLASSES, len(x))
    plain = of_sequences(Plain, is_masked, keras.optimizers.SGD(0.1))
    plain.run_eagerly = BACKEND == "tensorflow"  # tracing takes longer than the steps
    plain.fit(x, y, batch_size=BATCH * n, shuffle=False, verbose=0)
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = of_sequences(Sync, is_masked, optimizer)  # traced: test_exactness seldom draws that
    own_x, own_y = rows_of_rank(x, BATCH), rows_of_rank(y, BATCH)
    for start in range(0, len(own_x), BATCH):
        rows = slice(start, start + BATCH)
        model.train_on_batch(own_x[rows], own_y[rows])
    keras_dist.verify_replicas(model)  # includes moving statistics, which no callback averages here
    assert_close(weights_of(model), weights_of(plain), relative=1e-5)


def test_inference_does_not_communicate():
    layer = Sync()
    layer.build((None, FEATURES))
    if keras_dist.rank() == 0:
        layer(np.ones((2, FEATURES), "float32"), training=False)
    layer.trainable = False
    if keras_dist.rank() == 0:
        layer(np.ones((2, FEATURES), "float32"), training=True)
    # A rank that had communicated would be one operation ahead.
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


def test_saved_model_loads(tmp_path):
    classifier(Sync).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[0], Sync)
    assert loaded.layers[0].momentum == 0.5


@pytest.mark.parity("`BatchNormalization(synchronized=True)` gives an error with the remedy")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras itself rejects it on other backends")
@pytest.mark.skipif(keras_dist.size() == 1, reason="one process needs no other")
def test_synchronized_of_keras_is_rejected_with_the_remedy():
    def synchronized(**options):
        return Plain(synchronized=True, **options)

    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(errors.ArgumentError, match=r"keras_dist\.layers\.SyncBatch"):
        classifier(synchronized, optimizer).train_on_batch(*make_data(BATCH))
