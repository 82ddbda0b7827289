"""Callbacks on real ranks that see different data."""

import io
import signal
import threading
import warnings
from contextlib import redirect_stdout

import keras
import numpy as np
import pytest
from small_training import (
    CLASSES,
    agreed,
    distributed,
    make_data,
    make_model,
    weights_of,
    with_logs,
)

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    RootConsoleCallback,
)
from keras_dist.callbacks.broadcast import hyperparameters
from keras_dist.training.fit_session import running_in

# What callbacks do is the same on all backends, but for what builds, reads and writes a model.
pytestmark = pytest.mark.jobs("torch-1", "torch-2")
on_all_backends = pytest.mark.jobs("tensorflow-2", "jax-2")


def part(*arrays):
    """The rows of this rank; lower ranks have one more if the division is uneven."""
    return tuple(array[keras_dist.rank() :: keras_dist.size()] for array in arrays)


# --- The list


def test_the_list_is_flat_and_in_order():
    mine = keras.callbacks.EarlyStopping("loss")
    options = {"warmup_epochs": 2, "initial_lr": 0.1, "checkpoint": "m.keras"}
    names, more = (
        [type(made).__name__ for made in keras_dist.callbacks(mine, **options, throughput=counts)]
        for counts in (False, True)
    )
    assert names == [
        "RootConsoleCallback",
        "BroadcastGlobalVariablesCallback",
        "VerifyBatches",
        "UnevenDataCallback",
        "AverageStatisticsCallback",
        "MetricAverageCallback",
        "ProgressCallback",
        "LearningRateWarmupCallback",
        "EarlyStopping",
        "ModelCheckpoint",
        "VerifyReplicas",
        "AgreeOnStoppingCallback",
        "PreemptionCallback",
    ]
    assert [name for name in more if name != "Throughput"] == names
    assert more[5:7] == ["MetricAverageCallback", "Throughput"]


def test_the_package_in_place_of_its_list_is_refused():
    with pytest.raises(AttributeError, match=r"callbacks=keras_dist\.callbacks\(\)"):
        distributed().fit(*make_data(4), verbose=0, callbacks=[keras_dist.callbacks])


def unbuilt():
    """A model that is not built, with weights that differ between ranks once it is."""
    keras.utils.set_random_seed(keras_dist.rank())
    model = keras.Sequential([keras.layers.Dense(CLASSES, activation="softmax")])
    sgd = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(sgd, "sparse_categorical_crossentropy")
    return model


def loop(model, step, *further):
    """Calls a step in each of two epochs of a loop of one's own, which ends with equal weights."""
    callbacks = keras.callbacks.CallbackList(keras_dist.callbacks(*further), model=model)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        callbacks.on_train_batch_begin(0)
        logs = step()
        callbacks.on_train_batch_end(0, logs)
        callbacks.on_epoch_end(epoch, logs)
    callbacks.on_train_end()
    keras_dist.verify_replicas(model)
    assert agreed([weight.tobytes() for weight in weights_of(model)])


@pytest.mark.parametrize("make", [distributed, pytest.param(unbuilt, marks=on_all_backends)])
def test_a_list_without_parameters_takes_part_in_a_loop(make, shared_tmp_path):
    model = make()

    def step():
        return model.train_on_batch(*make_data(4, seed=keras_dist.rank()), return_dict=True)

    if make is distributed:  # the loop begins with a step that has been made before
        step()
    path = shared_tmp_path / "model.keras"
    warmup = keras_dist.callbacks.LearningRateWarmupCallback(0.1, 1, steps_per_epoch=1)
    saving = keras_dist.callbacks.ModelCheckpoint(str(path))
    loop(model, step, keras_dist.callbacks.Throughput(), saving, warmup)
    assert int(model.optimizer.iterations) == (3 if make is distributed else 2)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert path.exists()


@pytest.mark.parametrize("has_callbacks", [False, pytest.param(True, marks=on_all_backends)])
def test_a_fit_within_a_loop_builds_the_model_and_begins_with_the_roots_weights(has_callbacks):
    model = unbuilt()

    def step():
        own = keras_dist.callbacks() if has_callbacks else None
        model.fit(*make_data(8, seed=keras_dist.rank()), batch_size=4, verbose=0, callbacks=own)

    loop(model, step)
    assert int(model.optimizer.iterations) == 4


def test_a_loop_with_a_model_of_built_layers_begins_with_the_roots_weights():
    model = keras.Model()  # without a call, as a model with a train step of its own
    keras.utils.set_random_seed(keras_dist.rank())
    model.part = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    callbacks = keras.callbacks.CallbackList(keras_dist.callbacks(), model=model)
    callbacks.on_train_begin()
    assert agreed([weight.tobytes() for weight in weights_of(model)])
    callbacks.on_train_end()


def test_a_step_of_the_users_that_builds_the_model_of_a_loop_is_refused():
    if keras_dist.size() == 1:
        return
    model = unbuilt()
    callbacks = keras.callbacks.CallbackList(keras_dist.callbacks(), model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_train_batch_begin(0)
    model(make_data(4)[0])
    with pytest.raises(errors.UsageError, match=r"Call the model on a batch"):
        callbacks.on_train_batch_end(0)


def test_a_loop_that_raises_leaves_no_session():
    model = distributed()
    kept = keras.callbacks.CallbackList(keras_dist.callbacks(), model=model)

    def train(callbacks):
        callbacks.on_train_begin()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(keras.callbacks.CallbackList(keras_dist.callbacks(), model=model))
    assert running_in(model) is None
    with pytest.raises(ZeroDivisionError):
        train(kept)
    kept.on_train_begin()
    kept.on_train_end()
    assert running_in(model) is None


# --- Broadcast


@on_all_backends
@pytest.mark.jobs("training-double-torch-2")
@pytest.mark.parity("all ranks start from the root's weights")
@pytest.mark.parametrize("built", [True, False])
def test_all_ranks_start_from_the_roots_weights_in_every_fit(built):
    root = keras_dist.size() - 1
    keras.utils.set_random_seed(keras_dist.rank())
    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((6,)), *layers] if built else layers)
    frozen = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0, momentum=0.9))
    model.compile(frozen, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = make_data(8)
    callback = BroadcastGlobalVariablesCallback(root)
    for _ in range(2):
        if model.built:
            for weight in model.weights:
                weight.assign(np.full(weight.shape, keras_dist.rank(), "float32"))
        model.fit(x, y, verbose=0, callbacks=[callback])
        keras_dist.verify_replicas(model)
        if built:
            assert all((weight == root).all() for weight in weights_of(model))


@on_all_backends
@pytest.mark.parity("hyperparameters that differ from the root's are named before training")
def test_hyperparameters_that_differ_from_those_of_the_root_are_named_once():
    """All ranks train with the learning rate of the root, and momentums of their own."""
    rank, n = keras_dist.rank(), keras_dist.size()
    x, y = make_data(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for drawn in (keras.optimizers.SGD(0.1 / (1 + rank)), keras.optimizers.SGD(0.1)):
            model = make_model(keras_dist.DistributedOptimizer(drawn))
            model.fit(x, y, verbose=0, callbacks=keras_dist.callbacks())
            assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    texts = [str(one.message) for one in caught if "hyperparameters" in str(one.message)]
    assert len(texts) == (n > 1 and rank == 0)
    if texts:
        assert "learning_rate=0.05 on rank 1, where rank 0 has 0.1" in texts[0]
        assert "momentum" not in texts[0]
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.5)
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(schedule, momentum=0.1 * rank)
    )
    model = make_model(keras_dist.DistributedOptimizer(scaled))
    found = keras_dist.allgather_object(hyperparameters(model))
    differing = {name for one in found for name in one if one[name] != found[0][name]}
    names = {"inner_optimizer.learning_rate.decay_steps", "inner_optimizer.momentum"}
    assert differing == (names if n > 1 else set())


@on_all_backends
@pytest.mark.jobs("training-double-torch-2")
@pytest.mark.parity("local variables are not broadcast")
@pytest.mark.parametrize("own", [False, True])
def test_local_variables_stay_local(own):
    model = distributed(keras.optimizers.SGD(0.0))
    kernel, bias = model.weights[:2]
    for weight in model.weights:
        weight.assign(np.full(weight.shape, keras_dist.rank() + 1, "float32"))
    last = keras_dist.size() - 1
    given = kernel.value if own and hasattr(kernel.value, "assign") else kernel  # TensorFlow's own
    callback = BroadcastGlobalVariablesCallback(last, local_variables=given)
    callback.register_local_var(bias)
    model.fit(*make_data(8), verbose=0, callbacks=[callback])
    values = [float(weight.ravel()[0]) for weight in weights_of(model)]
    assert values == [keras_dist.rank() + 1, keras_dist.rank() + 1, last + 1, last + 1]


@pytest.mark.jobs("tensorflow-2")
def test_a_model_that_cannot_be_built_from_its_data_says_so():
    if keras_dist.size() == 1:
        pytest.skip("one rank has nothing to broadcast")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("other backends build every model before fit calls callbacks")

    class Eager(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES)

        def call(self, x):
            return self.dense(x * float(x.numpy().max()))

    model = Eager()
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse", run_eagerly=True)
    with pytest.raises(errors.ArgumentError, match="Build the model before fit"):
        model.fit(
            np.ones((8, 6)), np.ones((8, CLASSES)), verbose=0, callbacks=keras_dist.callbacks()
        )


# --- Metrics


def binary_model(rate=0.0):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(rate))
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    return model


@pytest.mark.long
@on_all_backends
@pytest.mark.jobs("torch-3")
@pytest.mark.parity("metrics of `fit` and `evaluate` equal those of one process")
def test_logs_equal_those_of_one_process_over_all_the_data():
    x, y = make_data(61)  # the ranks have unequal parts
    y = (y > 0).astype("float32")
    model = binary_model()  # the rate is 0, so the weights do not change during the epoch
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    own = keras_dist.data.shard((x, y), batch_size=8)
    callbacks = [MetricAverageCallback()]
    history = model.fit(own, validation_data=own, verbose=0, callbacks=callbacks).history
    evaluated = model.evaluate(own, verbose=0, return_dict=True, callbacks=callbacks)
    for name, value in expected.items():
        assert evaluated[name] == pytest.approx(value, rel=1e-6), name
        assert history[name][0] == pytest.approx(value, rel=1e-6), name
        assert history[f"val_{name}"][0] == pytest.approx(value, rel=1e-6), name
    assert agreed(evaluated)


WEIGHTED = [keras.metrics.MeanSquaredError, keras.metrics.CategoricalAccuracy]
METRICS = [
    keras.metrics.Recall,
    lambda: keras.metrics.F1Score(average="macro"),
    lambda: keras.metrics.F1Score(name="f1_of_each"),
    lambda: keras.metrics.OneHotIoU(CLASSES, [0]),
    lambda: keras.metrics.OneHotMeanIoU(CLASSES),
    keras.metrics.R2Score,
    lambda: keras.metrics.TopKCategoricalAccuracy(2),
    *WEIGHTED,
]


def test_every_metric_is_exact_with_weights_of_samples_and_classes():
    batch = 10  # equal on all ranks, so that each step is compiled once
    x, labels = make_data(batch * keras_dist.size())
    y = np.eye(CLASSES, dtype="float32")[labels]
    by_class = {0: 1.0, 1: 3.0, 2: 0.25}
    weights = np.array([by_class[label] for label in labels], "float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, activation="softmax")])
    model.compile(
        keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        "categorical_crossentropy",
        metrics=[make() for make in METRICS],
        weighted_metrics=[make(name=f"weighted_{make.__name__}") for make in WEIGHTED],
    )
    options = {"verbose": 0, "return_dict": True}
    expected = model.evaluate(x, y, sample_weight=weights, batch_size=batch, **options)
    assert len(expected) == 1 + len(METRICS) + len(WEIGHTED)
    weighted = keras_dist.data.shard((x, y, weights), batch_size=batch)
    plain = keras_dist.data.shard((x, y), batch_size=batch)
    callbacks = [MetricAverageCallback()]
    evaluated = model.evaluate(weighted, callbacks=callbacks, **options)
    for data, of_classes in ((weighted, None), (plain, by_class)):
        history = model.fit(
            data,
            class_weight=of_classes,
            validation_data=weighted,
            verbose=0,
            callbacks=callbacks,
        ).history
        for name, value in expected.items():
            for found in (history[name][0], history[f"val_{name}"][0], evaluated[name]):
                np.testing.assert_allclose(found, value, rtol=1e-5, err_msg=name)
    assert agreed(evaluated)


def test_evaluate_alone_is_local_also_after_a_fit_that_failed():
    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ValueError("on all ranks alike")

    model = binary_model()
    x, y = make_data(16, seed=keras_dist.rank())
    y = (y > 0).astype("float32")
    alone = model.evaluate(x, y, verbose=0)
    model.evaluate(x, y, verbose=0, callbacks=[MetricAverageCallback()])
    assert model.evaluate(x, y, verbose=0) == alone
    assert "_get_metrics_result_or_logs" not in vars(model)

    def fail():
        with pytest.raises(ValueError, match="on all ranks alike"):
            model.fit(x, y, verbose=0, callbacks=keras_dist.callbacks(Failing()))

    fail()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the script's own
    fail()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The next fit ends the signal listener of a failed fit.
    assert [thread.name for thread in threading.enumerate()].count("keras_dist signals") == 1
    if keras_dist.rank() == 0:
        model.evaluate(x, y, verbose=0)
    assert "_get_metrics_result_or_logs" not in vars(model)


@on_all_backends
@pytest.mark.parity("a custom `train_step`")
def test_a_custom_step_keeps_exact_metrics_beside_its_own_values():
    def change(logs):
        return {**logs, "rank": float(keras_dist.rank())}

    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = with_logs(change)(inputs, keras.layers.Dense(1, activation="sigmoid")(inputs))
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    x, y = make_data(8 * keras_dist.size() + 1)
    y = (y > 0).astype("float32")
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    callbacks = keras_dist.callbacks()
    own_x, own_y = part(x, y)  # one step on every rank, of 8 or 9 samples
    history = model.fit(own_x, own_y, batch_size=9, verbose=0, callbacks=callbacks).history
    assert history["auc"][0] == pytest.approx(expected["auc"], rel=1e-6)
    assert history["loss"][0] == pytest.approx(expected["loss"], rel=1e-6)
    assert history["rank"] == [pytest.approx((keras_dist.size() - 1) / 2)]


@pytest.mark.long
@on_all_backends
@pytest.mark.parity("`EarlyStopping` and `ReduceLROnPlateau` act equally on all ranks")
def test_callbacks_that_decide_by_metrics_decide_alike():
    model = distributed(keras.optimizers.SGD(0.5))
    x, y = make_data(32, seed=keras_dist.rank())
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.1)
    history = model.fit(
        x,
        y,
        epochs=12,
        verbose=0,
        validation_data=(x, y),
        callbacks=keras_dist.callbacks(stop, plateau),
    ).history
    assert agreed(history)
    assert agreed(stop.stopped_epoch)


# --- Console


@pytest.mark.long
@on_all_backends
@pytest.mark.parity("only the root prints")
def test_only_the_root_prints():
    interactive = keras.config.is_interactive_logging_enabled()
    model = distributed()
    x, y = make_data(8)
    for verbose in (1, 2, "auto"):
        out = io.StringIO()
        try:
            with redirect_stdout(out):
                stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, verbose=1)
                model.fit(x, y, epochs=3, verbose=verbose, callbacks=keras_dist.callbacks(stop))
                model.evaluate(x, y, verbose=verbose, callbacks=[RootConsoleCallback()])
        finally:
            if interactive:
                keras.utils.enable_interactive_logging()
        if keras_dist.rank() == 0:
            assert "Epoch 1/3" in out.getvalue()
            assert "early stopping" in out.getvalue()
        else:
            assert out.getvalue() == ""
