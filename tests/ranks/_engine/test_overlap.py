"""Reductions that overlap with the computation give the bits of those that do not."""

import types

import keras
import numpy as np
import pytest
from bits import equal_on_all
from small_training import CLASSES, compiled, make_data, rows_of_rank, weights_of

import keras_dist
from keras_dist import _gpu
from keras_dist._engine import FusedAllreduce
from keras_dist.ops import gradient_plans

pytestmark = pytest.mark.jobs("training", "jax-2")

BATCH, STEPS = 4, 4
IN_GRAPH = keras.backend.backend() != "torch"


@pytest.fixture
def overlap(monkeypatch):
    """A function that turns the overlap on or off; each gradient has a bucket of its own."""
    monkeypatch.setattr(gradient_plans, "bucket_nbytes", lambda *_: 1)
    return lambda on: monkeypatch.setattr(gradient_plans, "overlaps", lambda _: on)


@pytest.fixture
def log(monkeypatch):
    """The buckets that have been queued, and whose results were waited for, in this order."""
    seen = []
    queue = FusedAllreduce.queue_bucket

    def queue_bucket(self, number, *arguments):
        seen.append(("queued", number))
        handle = queue(self, number, *arguments)
        wait = handle.wait
        handle.wait = lambda: seen.append(("awaited", number)) or wait()
        return handle

    monkeypatch.setattr(FusedAllreduce, "queue_bucket", queue_bucket)
    return seen


LAYERS = {
    "dense": lambda: [keras.layers.Dense(16, activation="relu")],
    # Its statistics are averaged over the ranks: host calls within both passes.
    "normalised": lambda: [keras.layers.Dense(8), keras_dist.layers.SyncBatchNormalization()],
    "convolution": lambda: [
        keras.layers.Reshape((6, 1)),
        keras.layers.Conv1D(4, 3, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Flatten(),
    ],
    # On TensorFlow its gradients are rows.
    "embedding": lambda: [keras.layers.Embedding(20, 3), keras.layers.Flatten()],
}


def fit(name, optimizer, epochs=2):
    """Returns the bytes of the weights of a model after training."""
    keras.utils.set_random_seed(1)
    last = keras.layers.Dense(CLASSES, activation="softmax")
    model = keras.Sequential([keras.Input((6,)), *LAYERS[name](), last])
    compiled(model, keras_dist.DistributedOptimizer(OPTIMIZERS[optimizer]()))
    x, y = make_data(BATCH * STEPS * keras_dist.size())
    if name == "embedding":
        x = np.abs(10 * x).astype(int) % 20
    rows = [rows_of_rank(array, BATCH) for array in (x, y)]
    model.fit(*rows, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return [weight.tobytes() for weight in weights_of(model)]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "clipped adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("normalised", "accumulation"),
        ("normalised", "sgd"),
        pytest.param("convolution", "clipped adam", marks=pytest.mark.jobs("nodes-2+1")),
        ("embedding", "sgd"),
    ],
)
def test_bits_are_those_without_overlap(overlap, name, optimizer, monkeypatch):
    results = []
    for on in (True, False):
        overlap(on)
        if keras.backend.backend() == "jax" and not on:
            # XLA may fuse the operations of another program in another way, so the programs stay
            # those of an overlap: each call waits for its result.
            overlap(True)
            monkeypatch.setattr(FusedAllreduce, "queue_bucket", blocking)
        results.append(fit(name, optimizer))
    assert results[0] == results[1]
    assert equal_on_all(*results[0])


def blocking(self, number, *arguments):
    """Reduces a bucket at once, in place of `queue_bucket`."""
    results = self.reduce_bucket(number, *arguments)
    return types.SimpleNamespace(wait=lambda: results)


@pytest.mark.skipif(not IN_GRAPH, reason="torch queues from hooks")
def test_all_buckets_are_queued_before_the_first_is_awaited(overlap, log):
    if keras_dist.size() == 1:
        pytest.skip("one rank does not reduce")
    if keras.backend.backend() == "jax" and _gpu.counts_host_memory():
        pytest.skip("one host call starts all buckets of a GPU")
    overlap(True)
    fit("dense", "sgd", epochs=1)
    step = [(what, number) for what in ("queued", "awaited") for number in range(4)]
    assert log == step * STEPS
