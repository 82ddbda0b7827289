"""Callbacks on real ranks that see different data."""

import io
import os
import stat
import tempfile
import threading
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import keras
import numpy as np
import pytest
from training import CLASSES, agreed, make_data, make_model, weights_of, with_logs

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    ModelCheckpoint,
    RootConsoleCallback,
    files,
)


def distributed(optimizer=None, **options):
    wrapped = keras_dist.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    return make_model(optimizer=wrapped, **options)


def part(*arrays):
    """This rank's part, ranks with a lower number having one row more where it is uneven."""
    return tuple(array[keras_dist.rank() :: keras_dist.size()] for array in arrays)


# --- The list


def test_the_list_is_flat_and_in_order():
    mine = keras.callbacks.EarlyStopping("loss")
    made = keras_dist.callbacks(mine, warmup_epochs=2, initial_lr=0.1, checkpoint="m.keras")
    assert [type(callback).__name__ for callback in made] == [
        "RootConsoleCallback",
        "BroadcastGlobalVariablesCallback",
        "UnevenDataCallback",
        "AverageStatisticsCallback",
        "MetricAverageCallback",
        "LearningRateWarmupCallback",
        "EarlyStopping",
        "ModelCheckpoint",
        "AgreeOnStoppingCallback",
    ]


def test_a_warmup_needs_a_rate():
    with pytest.raises(errors.ArgumentError, match="initial_lr together with warmup_epochs"):
        keras_dist.callbacks(warmup_epochs=3)


# --- Broadcast


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


@pytest.mark.parity("local variables are not broadcast")
def test_local_variables_stay_local():
    model = distributed(keras.optimizers.SGD(0.0))
    kernel, bias = model.weights[:2]
    for weight in model.weights:
        weight.assign(np.full(weight.shape, keras_dist.rank() + 1, "float32"))
    callback = BroadcastGlobalVariablesCallback(0, local_variables=kernel)
    callback.register_local_var(bias)
    model.fit(*make_data(8), verbose=0, callbacks=[callback])
    values = [float(weight.ravel()[0]) for weight in weights_of(model)]
    assert values == [keras_dist.rank() + 1, keras_dist.rank() + 1, 1.0, 1.0]


@pytest.mark.parametrize("root", [-1, 99, "0"])
def test_a_root_that_is_no_rank_is_refused(root):
    with pytest.raises(errors.ArgumentError, match="root_rank to be a rank of this job"):
        BroadcastGlobalVariablesCallback(root)
    with pytest.raises(errors.ArgumentError, match="root_rank to be a rank of this job"):
        ModelCheckpoint("m.keras", root_rank=root)


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
    with pytest.raises(errors.ArgumentError, match="Build it before fit"):
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


@pytest.mark.parity("metrics of `fit` and `evaluate` equal those of one process")
@pytest.mark.parametrize("samples", [64, 61, 37])
def test_logs_equal_those_of_one_process_over_all_the_data(samples):
    x, y = make_data(samples)
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
    batch = 10  # equal ones everywhere, so that each step is compiled once
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


def test_own_states_are_put_back_and_evaluate_alone_is_local():
    model = binary_model()
    x, y = make_data(16, seed=keras_dist.rank())
    y = (y > 0).astype("float32")
    alone = model.evaluate(x, y, verbose=0)
    model.evaluate(x, y, verbose=0, callbacks=[MetricAverageCallback()])
    assert model.evaluate(x, y, verbose=0) == alone
    assert "_get_metrics_result_or_logs" not in vars(model)


@pytest.mark.parity("a `train_step` of one's own")
def test_what_a_custom_step_returns_is_averaged():
    def change(logs):
        return {"rank": float(keras_dist.rank()), "loss": logs["loss"] * 0.0}

    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = with_logs(change)(inputs, keras.layers.Dense(CLASSES, activation="softmax")(inputs))
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    history = model.fit(*make_data(8), verbose=0, callbacks=keras_dist.callbacks()).history
    assert history["rank"] == [pytest.approx((keras_dist.size() - 1) / 2)]


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


def test_a_metric_that_cannot_be_added_is_equal_on_all_ranks():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = keras.Variable(0.0, trainable=False, aggregation="none")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

        def result(self):
            return self.value + 0

    model = distributed(metrics=["accuracy", Largest()])
    x, y = make_data(8)
    y[:] = keras_dist.rank() % CLASSES
    root = keras_dist.size() - 1
    options = {"verbose": 0, "callbacks": [MetricAverageCallback(root_rank=root)]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(x, y, epochs=2, validation_data=(x, y), **options).history
        result = model.evaluate(x, y, return_dict=True, **options)
    expected = pytest.approx(np.mean([rank % CLASSES for rank in range(keras_dist.size())]))
    assert [*history["largest"], *history["val_largest"], result["largest"]] == [expected] * 5
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    # Once a fit and once an evaluate, by the root.
    assert len(texts) == (2 if keras_dist.rank() == root > 0 else 0)
    assert all("Received: largest ('none'); they are averaged. Keep" in text for text in texts)


@pytest.mark.parity("`EarlyStopping` and `ReduceLROnPlateau` decide alike")
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


# --- Learning rate


class Rates(keras.callbacks.Callback):
    """Records the rate with which each batch was trained."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(np.array(self.model.optimizer.learning_rate)))


def rates_of(*callbacks, epochs, steps=5, model=None, **fit_options):
    recorder = Rates()
    model = model or distributed(keras.optimizers.SGD(0.5, momentum=0.9))
    x, y = make_data(4 * steps)
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks, recorder],
        **fit_options,
    )
    return np.array(recorder.rates).reshape(-1, steps)


@pytest.mark.parity("warmup of the learning rate")
@pytest.mark.parametrize("warmup_epochs", [0.5, 1, 2.5, 3])
def test_warmup_rates_equal_the_formula_at_every_batch(warmup_epochs):
    n, steps, rate = keras_dist.size(), 5, 0.1 * keras_dist.size()
    rates = rates_of(LearningRateWarmupCallback(rate, warmup_epochs), epochs=4)
    for epoch in range(4):
        for batch in range(steps):
            done = min(epoch + (batch + 1) / steps, warmup_epochs)
            expected = rate / n * (1 + done * (n - 1) / warmup_epochs)
            assert rates[epoch, batch] == pytest.approx(expected, rel=1e-6)
    assert rates[-1, -1] == pytest.approx(rate, rel=1e-7)


def test_the_steps_of_an_epoch_are_those_of_this_fit():
    warmup = LearningRateWarmupCallback(0.4, 1)
    for steps in (5, 2, 10):
        assert rates_of(warmup, epochs=2, steps=steps)[-1, -1] == pytest.approx(0.4)


def test_warmup_resumes_where_it_was():
    whole = rates_of(LearningRateWarmupCallback(0.4, 3), epochs=3)
    resumed = rates_of(LearningRateWarmupCallback(0.4, 3), epochs=3, initial_epoch=2)
    np.testing.assert_array_equal(resumed[0], whole[2])


def test_a_constant_multiplier_is_a_constant_factor():
    rates = rates_of(
        LearningRateScheduleCallback(0.4, 0.1, start_epoch=1, end_epoch=3),
        LearningRateScheduleCallback(0.4, 0.01, start_epoch=3),
        epochs=5,
    )
    np.testing.assert_allclose(rates[:, 0], [0.5, 0.04, 0.04, 0.004, 0.004], rtol=1e-6)


def test_a_function_is_asked_once_an_epoch_or_at_every_batch():
    stairs = rates_of(LearningRateScheduleCallback(2.0, lambda epoch: epoch + 1), epochs=3)
    np.testing.assert_allclose(stairs, [[2.0] * 5, [4.0] * 5, [6.0] * 5])
    smooth = rates_of(
        LearningRateScheduleCallback(2.0, lambda epoch: epoch + 1, staircase=False), epochs=2
    )
    np.testing.assert_allclose(smooth.ravel(), 2.0 * (1 + np.arange(10) / 5), rtol=1e-6)


def test_the_rate_is_in_the_logs():
    model = distributed()
    history = model.fit(
        *make_data(8), epochs=2, verbose=0, callbacks=[LearningRateScheduleCallback(0.3, 0.5)]
    ).history
    assert history["learning_rate"] == [pytest.approx(0.15)] * 2


def test_momentum_correction_scales_the_velocity():
    """By hand: v <- 0.9 (new / old) v - new g, w <- w + v, with a gradient of 1 throughout."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    model.compile(keras_dist.DistributedOptimizer(optimizer), loss=lambda y, p: p)
    schedule = LearningRateScheduleCallback(1.0, lambda epoch: [1.0, 0.5, 0.5][int(epoch)])
    x = np.ones((4, 1), "float32")
    model.fit(x, x, batch_size=4, epochs=3, verbose=0, callbacks=[schedule])
    weight = velocity = 0.0
    for rate, ratio in ((1.0, 1.0), (0.5, 0.5), (0.5, 1.0)):
        velocity = 0.9 * ratio * velocity - rate
        weight += velocity
    assert float(np.array(model.layers[0].kernel)[0, 0]) == pytest.approx(weight, rel=1e-6)


def test_momentum_correction_knows_the_velocity_of_lars():
    model = make_model(keras_dist.DistributedOptimizer(keras_dist.optimizers.LARS(1.0)))
    model.optimizer.build(model.trainable_variables)
    velocity = model.optimizer.momentums[0]
    velocity.assign(keras.ops.ones(velocity.shape))
    schedule = LearningRateScheduleCallback(1.0, 0.5)
    schedule.set_model(model)
    schedule.on_epoch_begin(0)
    schedule.on_train_batch_begin(0)
    assert (keras.ops.convert_to_numpy(velocity) == 0.5).all()


def test_a_warmup_ends_at_its_rate_with_several_steps_per_execution():
    if keras.backend.backend() == "torch":
        pytest.skip("Keras on torch has no steps_per_execution")
    model = distributed(keras.optimizers.SGD(1.0), steps_per_execution=4)
    callbacks = keras_dist.callbacks(warmup_epochs=1, initial_lr=0.1)
    history = model.fit(*make_data(32), batch_size=4, verbose=0, callbacks=callbacks).history
    assert history["learning_rate"] == [pytest.approx(0.1)]


def test_bad_schedules_are_refused():
    if hasattr(keras.optimizers, "MultiOptimizer"):
        rates = {".*/bias": keras.optimizers.Adam(0.01)}
        each = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), rates)
        several = keras.optimizers.MultiOptimizer(each)
        with pytest.raises(errors.ArgumentError, match="with one learning rate"):
            distributed(several).fit(
                *make_data(8), verbose=0, callbacks=[LearningRateScheduleCallback(0.1, 1.0)]
            )
    with pytest.raises(errors.ArgumentError, match="initial_lr to be a number"):
        LearningRateScheduleCallback(None, 0.1)
    cosine = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = distributed(keras.optimizers.SGD(cosine))
    with pytest.raises(errors.ArgumentError, match="whose learning rate is a number"):
        model.fit(*make_data(8), verbose=0, callbacks=[LearningRateScheduleCallback(0.1, 1.0)])

    def endless():
        while True:
            yield make_data(4)

    with pytest.raises(errors.ArgumentError, match="number of steps in an epoch"):
        distributed().fit(endless(), verbose=0, callbacks=[LearningRateWarmupCallback(0.1)])


# --- Checkpoints


@pytest.mark.parity("`ModelCheckpoint`: the root writes, the others wait")
def test_only_the_root_writes_and_all_leave_together(shared_tmp_path):
    directory = shared_tmp_path / f"seen by rank {keras_dist.rank()}"
    directory.mkdir()
    model = distributed()
    checkpoint = ModelCheckpoint(directory / "deep" / "{epoch}.keras")
    model.fit(*make_data(8), epochs=2, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    written = sorted(path.name for path in directory.rglob("*.keras"))
    assert written == (["1.keras", "2.keras"] if keras_dist.rank() == 0 else [])
    assert not list(directory.rglob(".*"))
    if keras_dist.rank() == 0:
        loaded = keras.saving.load_model(directory / "deep" / "2.keras")
        for weight, expected in zip(loaded.get_weights(), weights_of(model), strict=True):
            np.testing.assert_array_equal(weight, expected)


def test_the_best_is_kept_and_weights_alone_can_be_written(shared_tmp_path):
    model = distributed(keras.optimizers.SGD(0.0))
    path = shared_tmp_path / "best.weights.h5"
    checkpoint = ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True)
    x, y = make_data(8)
    # In the same order, as another one may round to a loss that is better in the last bit.
    model.fit(x, y, shuffle=False, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    first = path.stat().st_mtime_ns
    keras_dist.barrier()
    model.fit(x, y, shuffle=False, verbose=0, callbacks=keras_dist.callbacks(checkpoint))
    assert path.stat().st_mtime_ns == first
    assert agreed(checkpoint.best)


def test_batches_can_be_counted(shared_tmp_path):
    model = distributed()
    checkpoint = ModelCheckpoint(shared_tmp_path / "{epoch}-{batch}.keras", save_freq=2)
    model.fit(*make_data(16), batch_size=4, verbose=0, callbacks=[checkpoint])
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["1-2.keras", "1-4.keras"]


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(shared_tmp_path):
    target = shared_tmp_path / "taken.keras"
    if keras_dist.rank() == 0:
        (target / "inside").mkdir(parents=True)
    keras_dist.barrier()
    model = distributed()
    with pytest.raises(errors.CheckpointError) as caught:
        model.fit(*make_data(8), verbose=0, callbacks=[ModelCheckpoint(target)])
    assert f"to write the checkpoint {target}" in str(caught.value)
    assert agreed(str(caught.value))
    assert [path.name for path in shared_tmp_path.iterdir()] == ["taken.keras"]


def test_a_failed_write_leaves_the_previous_checkpoint_whole(shared_tmp_path, monkeypatch):
    model = distributed()
    path = shared_tmp_path / "model.keras"
    x, y = make_data(8)
    model.fit(x, y, verbose=0, callbacks=[ModelCheckpoint(path)])
    keras_dist.barrier()
    before = path.read_bytes()

    def fail(model, beside):
        Path(beside).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save", fail)
    with pytest.raises(errors.CheckpointError, match="No space left on device"):
        model.fit(x, y, verbose=0, callbacks=[ModelCheckpoint(path)])
    assert path.read_bytes() == before
    assert [entry.name for entry in shared_tmp_path.iterdir()] == ["model.keras"]


def test_checkpoints_carry_the_users_umask(shared_tmp_path):
    before = os.umask(0o027)
    try:
        path = shared_tmp_path / "model.keras"
        distributed().fit(*make_data(8), verbose=0, callbacks=[ModelCheckpoint(path)])
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)


SCORES = [0.5, 0.7, 0.6]


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"mode": "max"}, ["1-0.5", "2-0.7"]),
        ({"mode": "min"}, ["1-0.5"]),
        ({"mode": "max", "initial_value_threshold": 0.55}, ["2-0.7"]),
        ({"mode": "min", "save_freq": 2}, ["1-0.5"]),
        ({"mode": "max", "asynchronous": True}, ["1-0.5", "2-0.7"]),
        ({"mode": "max", "save_best_only": False}, ["1-0.5", "2-0.7", "3-0.6"]),
    ],
)
def test_options_of_keras_mean_what_they_do_there(options, written, shared_tmp_path, capsys):
    model = distributed()
    path = str(shared_tmp_path / "{epoch}-{score:.1f}.keras")
    options = {"save_best_only": True, "verbose": 1} | options
    checkpoint = ModelCheckpoint(path, "score", **options)
    checkpoint.set_model(model)
    capsys.readouterr()
    for epoch, score in enumerate(SCORES):
        checkpoint.on_epoch_begin(epoch)
        for batch in range(2):
            checkpoint.on_train_batch_end(batch, {"score": score})
        checkpoint.on_epoch_end(epoch, {"score": score})
    checkpoint.on_train_end()
    keras_dist.barrier()
    assert sorted(entry.stem for entry in shared_tmp_path.iterdir()) == written
    if options["save_best_only"]:
        assert checkpoint.best == (max if options["mode"] == "max" else min)(SCORES)
    printed = capsys.readouterr().out
    # Later versions of Keras also say that they have finished.
    saved = printed.count("saving model to") - printed.count("finished saving")
    assert saved == (len(written) if keras_dist.rank() == 0 else 0), printed


# --- Checkpoints that are written while training goes on


class Release(keras.callbacks.Callback):
    """Lets a copy that waits go on, when the second epoch has begun."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.event.set()


def fit_behind(checkpoint, *others, epochs=2):
    model = distributed(run_eagerly=True)
    callbacks = keras_dist.callbacks(*others, checkpoint)
    model.fit(*make_data(8), epochs=epochs, verbose=0, callbacks=callbacks)
    return model


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The directory of temporary files, this rank's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_training_goes_on_while_a_checkpoint_is_written(shared_tmp_path, temporary, monkeypatch):
    release, waited = Release(), []

    def slow(*arguments):
        waited.append(release.event.wait(20))
        copy(*arguments)

    copy = files._copy
    monkeypatch.setattr(files, "_copy", slow)
    path = shared_tmp_path / "{epoch}.keras"
    model = fit_behind(ModelCheckpoint(path, asynchronous=True), release)
    keras_dist.barrier()
    # The second epoch began while the first checkpoint was not there yet, and both are there now.
    assert waited == ([True, True] if keras_dist.rank() == 0 else [])
    assert sorted(entry.name for entry in shared_tmp_path.iterdir()) == ["1.keras", "2.keras"]
    assert list(temporary.glob("keras_dist*")) == []
    loaded = keras.saving.load_model(shared_tmp_path / "2.keras")
    for weight, expected in zip(loaded.get_weights(), weights_of(model), strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_write_that_fails_behind_is_an_error_on_every_rank(
    epochs, shared_tmp_path, temporary, monkeypatch
):
    def fail(content, beside):
        Path(beside).write_bytes(content.read(100))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_copy", fail)
    path = shared_tmp_path / "{epoch}.keras"
    with pytest.raises(errors.CheckpointError, match="No space left on device") as caught:
        fit_behind(ModelCheckpoint(path, asynchronous=True), epochs=epochs)
    assert f"to write the checkpoint {shared_tmp_path / '1.keras'}" in str(caught.value)
    assert agreed(str(caught.value))
    keras_dist.barrier()
    assert [*shared_tmp_path.iterdir(), *temporary.glob("keras_dist*")] == []


# --- Console


@pytest.mark.parity("only the root prints")
@pytest.mark.parametrize("verbose", [1, 2, "auto"])
def test_only_the_root_prints(verbose):
    interactive = keras.config.is_interactive_logging_enabled()
    model = distributed()
    x, y = make_data(8)
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
