"""Logs on ranks that log different values, and calls of `fit` and `evaluate` within `fit`."""

import keras
import numpy as np
import pytest
from keras import ops
from small_training import agreed

import keras_dist
from keras_dist import _engine
from keras_dist.callbacks import MetricAverageCallback

pytestmark = pytest.mark.jobs("torch-2")
on_all_backends = pytest.mark.jobs("tensorflow-2", "jax-2")

BACKEND = keras.backend.backend()
BATCH = 4


class Logging(keras.Sequential):
    """A model whose steps add the result of `added` to their logs."""

    def __init__(self, added):
        super().__init__([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        self.added = added

    def train_step(self, *arguments):
        return self._with_more(super().train_step(*arguments))

    def test_step(self, *arguments):
        return self._with_more(super().test_step(*arguments))

    def _with_more(self, found):
        if BACKEND == "jax":  # a step on JAX also returns its new state
            return {**found[0], **self.added()}, found[1]
        return {**found, **self.added()}


def compiled(model, **options):
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def data_of(rank, batches=2):
    y = np.arange(BATCH * batches, dtype="float32")[:, None] + rank
    return np.zeros_like(y), y


def every_log(added):
    """The logs of an epoch with validation, as a callback gets them, and those of `evaluate`."""
    model = compiled(Logging(added), run_eagerly=True)
    seen = []
    see = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    x, y = data_of(keras_dist.rank())
    options = {"batch_size": BATCH, "verbose": 0}
    callbacks = keras_dist.callbacks(see)
    fitted = model.fit(x, y, validation_data=(x, y), callbacks=callbacks, **options).history
    assert seen[0].keys() == fitted.keys()
    options["callbacks"] = keras_dist.callbacks()
    listed = model.evaluate(x, y, **options)
    evaluated = model.evaluate(x, y, return_dict=True, **options)
    assert len(listed) == len(evaluated)
    assert all(any(value is one for one in (*listed, *evaluated.values())) for value in listed)
    return seen[0], evaluated


def plain(value):
    """A value of the logs without the array that TensorFlow makes of it."""
    value = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    return value.decode() if isinstance(value, bytes) else value


@on_all_backends
@pytest.mark.parity("nested logs, text, `None`, booleans and arrays in the logs of a step")
def test_each_kind_of_value_in_the_logs():
    rank, size = keras_dist.rank(), keras_dist.size()
    mean, last = (size - 1) / 2, size - 1

    def added():
        logs = {
            "text": f"rank {rank}",
            "nothing": None,
            "any": rank == 0,
            "tensor": ops.convert_to_tensor(float(rank)),
            "numpy": np.float32(rank),
            "integer": rank,
            "equal": 0.1,
            "outer": {"inner": ops.convert_to_tensor(2.0 * rank), "deep": {"deepest": 3 * rank}},
            "array": np.array([rank, 1.0]),
            "integers": np.array([rank, 2]),
            "rows": np.zeros(rank + 1),
            "not a number": float("nan") if rank == last else 1.0,
        }
        more = {"of the last": 5.0, "group": {"of the last too": 6.0}, "or": 7.0}
        return logs | (more if rank == last else {"or": None})

    fitted, evaluated = every_log(added)
    validated = {n.removeprefix("val_"): v for n, v in fitted.items() if n.startswith("val_")}
    everywhere = keras_dist.allgather_object([sorted(fitted), sorted(evaluated)])
    assert all(names == everywhere[0] for names in everywhere)
    for logs in (fitted, validated, evaluated):
        assert plain(logs["text"]) == f"rank {rank}"
        assert logs["nothing"] is None
        assert logs["any"] == 1.0
        assert logs["equal"] == pytest.approx(0.1)
        factors = {"tensor": 1, "numpy": 1, "integer": 1, "inner": 2, "deepest": 3}
        for name, factor in factors.items():
            assert logs[name] == pytest.approx(factor * mean), name
        np.testing.assert_allclose(logs["array"], [mean, 1.0])
        np.testing.assert_allclose(logs["integers"], [mean, 2.0])
        assert np.size(logs["rows"]) == rank + 1
        assert np.isnan(logs["not a number"])
        assert not {"outer", "deep", "group"} & logs.keys()
        assert (logs["of the last"], logs["of the last too"], logs["or"]) == (5.0, 6.0, 7.0)
    assert fitted["mae"] == pytest.approx(np.mean([data_of(rank)[1] for rank in range(size)]))


def test_a_step_that_returns_its_own_loss_keeps_it():
    class Plain(keras.Sequential):
        def test_step(self, *arguments):
            rank = float(keras_dist.rank())
            return {"loss": ops.convert_to_tensor(rank), "other": ops.convert_to_tensor(1.0)}

    model = Plain([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse")
    callbacks = [MetricAverageCallback()]
    logs = model.evaluate(*data_of(0), callbacks=callbacks, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx((keras_dist.size() - 1) / 2)


# --- Calls within fit


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


@pytest.mark.long
@pytest.mark.parity("`fit`, `evaluate` and `predict` within `fit`")
@pytest.mark.parametrize(
    ("another", "uneven"),
    [
        pytest.param(False, "continue", marks=on_all_backends),
        pytest.param(True, "stop", marks=pytest.mark.jobs("jax-2")),
    ],
)
def test_calls_within_fit_leave_its_logs_and_hooks(another, uneven):
    rank, size = keras_dist.rank(), keras_dist.size()
    calls = [evaluate, evaluate_on_the_root, predict, fit]
    if BACKEND != "jax":  # Keras loses the variables of a model on JAX where evaluate fails
        calls.insert(0, fail_to_evaluate)
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
