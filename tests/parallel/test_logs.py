"""Logs on ranks with different data, and calls of `fit`, `evaluate` and `predict` within `fit`."""

import keras
import numpy as np
import pytest
from training import agreed

import keras_dist
from keras_dist import _engine
from keras_dist.callbacks import MetricAverageCallback

BACKEND = keras.backend.backend()
BATCH = 4


def compiled(model, **options):
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def data_of(rank, batches=2):
    y = np.arange(BATCH * batches, dtype="float32")[:, None] + rank
    return np.zeros_like(y), y


class Calling(keras.callbacks.Callback):
    """Calls functions at the end of each epoch, and at its begin and after its first batch.

    Within an epoch of the same model, Keras itself would change the metrics of the epoch.
    """

    def __init__(self, calls, model=None):
        super().__init__()
        self.calls, self.other = calls, model
        self.found, self.logs = {}, []

    def on_epoch_begin(self, epoch, logs=None):
        if self.other is not None:
            self._call(self.other)

    def on_train_batch_end(self, batch, logs=None):
        if self.other is not None and batch == 0:
            self._call(self.other)

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(logs)
        self._call(self.other or self.model)

    def _call(self, model):
        self.found = {call.__name__: call(model) for call in self.calls}
        assert _engine.piggyback.has_listener()  # for signals in the fit around them


def model_of():
    layers = [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
    # TensorFlow would trace each call.
    return compiled(keras.Sequential(layers), run_eagerly=BACKEND == "tensorflow")


def evaluate(model):
    x, y = data_of(keras_dist.rank())
    options = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
    return model.evaluate(x, y, callbacks=keras_dist.callbacks(), **options)


def evaluate_on_the_root(model):
    if keras_dist.rank() > 0:
        return None
    return model.evaluate(*data_of(0), batch_size=BATCH, verbose=0, return_dict=True)


def fail_to_evaluate(model):
    def fail(batch, logs):
        raise ValueError("within an evaluate")

    failing = keras.callbacks.LambdaCallback(on_test_batch_end=fail)
    callbacks = [MetricAverageCallback(), failing]
    with pytest.raises(ValueError, match="within an evaluate"):
        model.evaluate(*data_of(0), batch_size=BATCH, verbose=0, callbacks=callbacks)


def predict(model):
    callbacks = keras_dist.callbacks() if keras_dist.rank() == 0 else None
    return model.predict(data_of(0)[0], batch_size=BATCH, verbose=0, callbacks=callbacks)


def fit(model):
    x, y = data_of(keras_dist.rank())
    see = Calling([])
    options = {"batch_size": BATCH, "verbose": 0, "validation_data": (x, y)}
    model.fit(x, y, callbacks=keras_dist.callbacks(see), **options)
    return see.logs[-1]


@pytest.mark.parity("`fit`, `evaluate` and `predict` within `fit`")
@pytest.mark.parametrize(("another", "uneven"), [(False, "continue"), (True, "stop")])
def test_calls_within_fit_leave_its_logs_and_hooks(another, uneven):
    rank, size = keras_dist.rank(), keras_dist.size()
    calls = [evaluate, evaluate_on_the_root, fail_to_evaluate, predict, fit]
    calling = Calling(calls, model_of() if another else None)
    model = model_of()
    x, y = data_of(rank, 2 + rank)
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "validation_data": (x, y)}
    model.fit(x, y, callbacks=keras_dist.callbacks(calling, uneven=uneven), **options)
    assert len(calling.logs) == 2
    assert agreed(calling.logs)
    mean = pytest.approx(np.mean(np.concatenate([data_of(r, 2 + r)[1] for r in range(size)])))
    assert all(logs["val_mae"] == mean for logs in calling.logs)
    if uneven == "continue":
        assert all(logs["mae"] == mean for logs in calling.logs)
    else:
        assert int(model.optimizer.iterations) == 2 * 2  # epochs, steps until a rank is out of data
    assert not {"_get_metrics_result_or_logs", "_keras_dist_task"} & vars(model).keys()
    everywhere = pytest.approx(np.mean([np.mean(data_of(r)[1]) for r in range(size)]))
    assert calling.found["evaluate"]["mae"] == everywhere
    assert calling.found["fit"]["mae"] == calling.found["fit"]["val_mae"] == everywhere
    if rank == 0:
        alone = calling.found["evaluate_on_the_root"]["mae"]
        assert alone == pytest.approx(np.mean(data_of(0)[1]))
