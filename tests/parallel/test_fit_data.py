"""Sharded arrays and `PyDataset` in `fit` on every backend: each sample once, in equal steps."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.data import shard

BATCH = 4
TOTAL = 8 * keras_dist.size() + 1  # rank 0 has one sample more than the others


class Numbered(keras.utils.PyDataset):
    """Batches of consecutive numbers."""

    def __len__(self):
        return -(-TOTAL // BATCH)

    def __getitem__(self, index):
        x = np.arange(index * BATCH, min(TOTAL, (index + 1) * BATCH), dtype="float32")[:, None]
        return x, x


def arrays():
    x = np.arange(TOTAL, dtype="float32")[:, None]
    return shard((x, x), BATCH)


@pytest.mark.parametrize("make", [arrays, lambda: shard(Numbered())], ids=["arrays", "PyDataset"])
def test_fit_trains_on_every_sample_once_an_epoch(make):
    means = [
        keras.metrics.MeanMetricWrapper(lambda y_true, y_pred: y_true, name="mean"),
        keras.metrics.MeanMetricWrapper(lambda y_true, y_pred: y_true**2, name="mean_square"),
    ]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=means)
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
    history = model.fit(make(), epochs=2, verbose=0, callbacks=keras_dist.callbacks(count)).history
    numbers = np.arange(TOTAL)
    assert history["mean"] == pytest.approx([numbers.mean()] * 2)
    assert history["mean_square"] == pytest.approx([(numbers**2).mean()] * 2)
    assert len(set(keras_dist.allgather_object(tuple(steps)))) == 1
