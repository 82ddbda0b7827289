"""Throughput of all ranks, and the time they wait for each other."""

import time

import keras
import numpy as np
import pytest
from small_training import agreed, compiled, make_data, make_model, with_logs

import keras_dist
from keras_dist import _engine, runtime
from keras_dist.callbacks import throughput

pytestmark = pytest.mark.jobs("torch-2")

EPOCH_SECONDS = 2.0
SAMPLES, BATCH, STEPS = 10, 4, 3  # the last batch has 2


@pytest.fixture
def clock(monkeypatch):
    """A callback that makes every epoch last two seconds, all before its steps."""
    now = {"seconds": 0.0, "waited": 0.0}
    monkeypatch.setattr(throughput, "perf_counter", lambda: now["seconds"])
    monkeypatch.setattr(_engine.wait, "waited_seconds", lambda: now["waited"])

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            now["seconds"] += EPOCH_SECONDS
            now["waited"] += 0.5 * (runtime.rank() + 1)

    return Clock()


def fit(model, *others, **options):
    x, y = make_data(SAMPLES, seed=keras_dist.rank())
    callbacks = keras_dist.callbacks(*others, throughput=True)
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, **options}
    return model.fit(x, y, callbacks=callbacks, **options).history


def distributed(make=make_model, **options):
    return make(optimizer=keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), **options)


@pytest.mark.jobs("tensorflow-2", "jax-2")
@pytest.mark.parity("throughput and waits in the logs")
def test_samples_of_all_ranks_and_the_mean_of_their_waiting(clock, shared_tmp_path):
    n = keras_dist.size()
    path = shared_tmp_path / "log.csv"
    logger = keras_dist.callbacks.RootOnly(keras.callbacks.CSVLogger(str(path)))
    # Validation in the second epoch only, which resets the counters of the epoch.
    x, y = make_data(7)
    history = fit(distributed(), clock, logger, validation_data=(x, y), validation_freq=2)
    assert history["samples_per_second"] == [SAMPLES * n / EPOCH_SECONDS] * 2
    assert history["waiting"] == pytest.approx([0.5 * (n + 1) / 2 / EPOCH_SECONDS] * 2)
    assert agreed(history)
    if keras_dist.rank() == 0:
        assert {"samples_per_second", "waiting"} <= set(path.read_text().split("\n")[0].split(","))


def test_a_step_of_ones_own_that_counts_no_samples(clock):
    class Batches(keras.metrics.Mean):
        def update_state(self, values, sample_weight=None):
            super().update_state(values)

    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(3, activation="softmax")(inputs)
    model = with_logs(lambda logs: logs)(inputs, outputs)
    distributed(lambda optimizer: compiled(model, optimizer))
    model._loss_tracker = Batches(name="loss")
    history = fit(model, clock)
    assert history["steps_per_second"] == [STEPS / EPOCH_SECONDS] * 2
    assert "samples_per_second" not in history


class Shown(keras.callbacks.Callback):
    """Records the logs of batches that the progress bar shows, except metrics."""

    def on_epoch_begin(self, epoch, logs=None):
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: value for name, value in logs.items() if name != "loss"})


def test_the_progress_bar_shows_the_speed_of_this_ranks_steps(clock):
    shown = Shown()
    fit(distributed(), clock, shown)
    # Each step of the previous epoch had this number of samples.
    speed = SAMPLES * keras_dist.size() / STEPS / EPOCH_SECONDS
    waiting = min(0.5 * (keras_dist.rank() + 1) / EPOCH_SECONDS, 1.0)
    assert shown.logs == [
        {"samples_per_second": pytest.approx(speed * step), "waiting": waiting}
        for step in range(1, STEPS + 1)
    ]


class Late(keras.callbacks.Callback):
    """Delays rank 0 in the third epoch; JAX also compiles in the second."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch == 2 and batch == 0 and keras_dist.rank() == 0:
            time.sleep(0.5)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def test_one_that_is_late_lets_the_others_wait(capsys):
    n = keras_dist.size()
    history = fit(distributed(), Late(), epochs=3, verbose=2)
    assert agreed(history)
    assert np.isfinite(history["samples_per_second"]).all()
    # Rank 0 does not wait for itself, and traced steps take almost no time.
    assert 0.3 * (n - 1) / n <= history["waiting"][2] <= (n - 1) / n + 0.1
    if keras_dist.rank() == 0:
        assert f"waiting: {history['waiting'][2]:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["copy", "mpi"])
def test_waits_are_counted_where_they_happen(way):
    comm = runtime.communicator()
    other = _engine.Communicator(comm.mpi, comm.world, way)
    _engine.collectives.barrier(other)
    before = _engine.wait.waited_seconds()
    if comm.rank == 0:
        time.sleep(0.3)
    _engine.collectives.barrier(other)
    waited = _engine.wait.waited_seconds() - before
    assert (waited > 0.2) == (comm.rank > 0)
    other.free()


def test_scalars_are_written_again_after_a_fit_that_has_raised(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(throughput.endpoints, "current", lambda: True)
        patch.setattr(throughput.importlib.util, "find_spec", lambda name: True)
        scalars = throughput.WriteScalars(tmp_path)
    begun = []
    monkeypatch.setattr(scalars, "_run", lambda: begun.append(True))
    for _ in range(2):  # without `on_train_end`
        scalars.on_train_begin()
        scalars.on_epoch_begin(0)
    scalars.on_train_end()
    assert len(begun) == (2 if keras_dist.rank() == 0 else 0)
