"""Learning rates and velocities set by callbacks, without training."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_dist import errors
from keras_dist.callbacks import learning_rate
from keras_dist.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)

RANKS = 4


@pytest.fixture(autouse=True)
def some_ranks(monkeypatch):
    """The number of ranks for which a formula is computed."""
    root = SimpleNamespace(fit_size=lambda: RANKS, fit_rank=lambda: 0, rank=lambda: 0)
    monkeypatch.setattr(learning_rate, "runtime", root)
    return root


def begun(callback, optimizer=None, steps=5):
    """A callback at the start of a fit with the given optimizer."""
    callback.set_model(SimpleNamespace(optimizer=optimizer or keras.optimizers.SGD(0.5)))
    callback.set_params({"steps": steps})
    callback.on_train_begin()
    return callback


def rate_of(callback):
    return float(keras.ops.convert_to_numpy(callback.model.optimizer.learning_rate))


def rates(callback, epochs, steps=5, **options):
    """The rate of each batch of each epoch, and the logged rate of each epoch."""
    begun(callback, steps=steps, **options)
    found, logged = [], []
    for epoch in epochs:
        callback.on_epoch_begin(epoch)
        for batch in range(steps):
            callback.on_train_batch_begin(batch)
            found.append(rate_of(callback))
        logs = {}
        callback.on_epoch_end(epoch, logs)
        logged.append(logs["learning_rate"])
    return found, logged


def near(expected):
    return pytest.approx(expected, rel=1e-6)


# --- Schedules


def test_a_constant_acts_in_its_epochs_alone():
    found, logged = rates(LearningRateScheduleCallback(2.0, 0.1, start_epoch=1, end_epoch=3), [0])
    assert (found, logged) == (near([0.5] * 5), near([0.5]))
    schedule = LearningRateScheduleCallback(2.0, 0.1, start_epoch=1, end_epoch=3)
    assert rates(schedule, [1, 2])[1] == near([0.2, 0.2])
    assert rates(schedule, [3, 4])[1] == near([0.5, 0.5])
    assert rates(LearningRateScheduleCallback(2.0, 0.1), [0, 90])[1] == near([0.2, 0.2])


def test_a_staircase_asks_once_an_epoch_for_a_whole_number():
    asked = []
    schedule = LearningRateScheduleCallback(2.0, lambda epoch: asked.append(epoch) or epoch + 1.0)
    found, _ = rates(schedule, [0, 2])
    assert (found, asked) == (near([2.0] * 5 + [6.0] * 5), [0, 2])
    begun(schedule).on_train_batch_begin(1)  # in the middle of epoch 2
    assert rate_of(schedule) == near(0.5)


def test_a_slope_asks_at_every_batch():
    schedule = LearningRateScheduleCallback(2.0, lambda epoch: epoch, staircase=False)
    assert rates(schedule, [1])[0] == near([2.0, 2.4, 2.8, 3.2, 3.6])
    assert rates(schedule, [1], steps=2)[0] == near([2.0, 3.0])
    told = LearningRateScheduleCallback(
        2.0, lambda epoch: epoch, staircase=False, steps_per_epoch=4
    )
    assert rates(told, [1], steps=2)[0] == near([2.0, 2.5])


def test_a_constant_has_no_slope():
    schedule = LearningRateScheduleCallback(2.0, 0.5, staircase=False)
    begun(schedule, steps=None)
    schedule.on_train_batch_begin(0)
    assert rate_of(schedule) == near(1.0)
    schedule.model.optimizer.learning_rate = 0.3
    schedule.on_train_batch_begin(1)
    assert rate_of(schedule) == near(0.3)


def test_the_steps_must_be_known_where_there_is_a_slope():
    with pytest.raises(errors.ArgumentError, match="Expected a known number of steps"):
        begun(LearningRateScheduleCallback(2.0, lambda epoch: epoch, staircase=False), steps=None)
    begun(LearningRateScheduleCallback(2.0, lambda epoch: epoch), steps=None)
    warmup = LearningRateWarmupCallback(0.4, 1, steps_per_epoch=2)
    begun(warmup, steps=None).on_train_batch_begin(0)
    assert rate_of(warmup) == near(0.1 + 0.3 / 2)


def test_an_epoch_without_logs():
    schedule = begun(LearningRateScheduleCallback(2.0, 0.5))
    schedule.on_epoch_end(0)
    assert rate_of(schedule) == near(0.5)


# --- Velocities


def momentum(rate=0.5, **options):
    """An optimizer with a velocity of 1."""
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, **options)
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    optimizer.momentums[0].assign(np.ones(2, "float32"))
    return optimizer


def velocity_after(multiplier, optimizer, **options):
    schedule = LearningRateScheduleCallback(1.0, multiplier, **options)
    begun(schedule, optimizer).on_train_batch_begin(0)
    return keras.ops.convert_to_numpy(optimizer.momentums[0]).tolist()


def test_a_velocity_is_scaled_as_its_rate():
    assert velocity_after(0.25, momentum()) == [0.5, 0.5]
    assert velocity_after(2.0, momentum()) == [4.0, 4.0]
    assert velocity_after(0.5, momentum()) == [1.0, 1.0]
    assert velocity_after(0.25, momentum(), momentum_correction=False) == [1.0, 1.0]
    assert velocity_after(0.25, momentum(rate=0.0)) == [1.0, 1.0]  # accumulated with rate 0


def test_a_velocity_counts_from_the_last_rate_that_was_not_0():
    factors = iter([0.25, 0.0, 0.5, 0.0, 0.25])
    schedule = begun(LearningRateScheduleCallback(1.0, lambda epoch: next(factors)), momentum())
    velocities = []
    for _ in range(5):
        schedule.on_train_batch_begin(0)
        velocity = keras.ops.convert_to_numpy(schedule.model.optimizer.momentums[0])
        velocities.append(float(velocity[0]))
    assert velocities == [0.5, 0.5, 1.0, 1.0, 0.5]


def test_a_backup_keeps_the_last_rate_that_was_not_0():
    schedule = LearningRateScheduleCallback(1.0, 0.0)
    assert schedule.state_dict() == {"rate_of_velocity": 0.0}
    begun(schedule).on_train_batch_begin(0)
    assert schedule.state_dict() == {"rate_of_velocity": 0.5}
    assert begun(schedule).state_dict() == {"rate_of_velocity": 0.0}
    resumed, optimizer = LearningRateScheduleCallback(1.0, 0.25), momentum(rate=0.0)
    begun(resumed, optimizer).load_state_dict({"rate_of_velocity": 0.5})
    resumed.on_train_batch_begin(0)
    assert keras.ops.convert_to_numpy(optimizer.momentums[0]).tolist() == [0.5, 0.5]


def test_the_optimizer_within_a_loss_scale_is_meant():
    inner = momentum()
    scaling = keras.optimizers.LossScaleOptimizer(inner)
    schedule = LearningRateScheduleCallback(1.0, 0.25)
    begun(schedule, scaling).on_train_batch_begin(0)
    assert float(keras.ops.convert_to_numpy(inner.learning_rate)) == near(0.25)
    assert keras.ops.convert_to_numpy(inner.momentums[0]).tolist() == [0.5, 0.5]


def test_no_velocity_is_needed():
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    for one in (optimizer, keras.optimizers.Adam(0.5)):
        schedule = LearningRateScheduleCallback(1.0, 0.25)
        begun(schedule, one).on_train_batch_begin(0)
        assert rate_of(schedule) == near(0.25)


# --- The warmup


@pytest.mark.parametrize("epochs", [1, 1.5, 2])
def test_a_warmup_grows_with_every_batch_to_its_rate(epochs):
    found, logged = rates(LearningRateWarmupCallback(0.4, epochs), range(3))
    done = [min((batch + 1) / 5, epochs) for batch in range(10 if epochs > 1 else 5)]
    expected = [0.1 * (1 + 3 * part / epochs) for part in done]
    assert found == near(expected + [0.4] * (15 - len(done)))
    assert logged[-1] == near(0.4)


def test_a_warmup_is_complete_at_the_end_of_its_last_epoch():
    for epochs, last in ((1, 0), (1.5, 1), (2, 1), (3, 2)):
        warmup = begun(LearningRateWarmupCallback(0.4, epochs))
        for epoch in range(4):
            warmup.model.optimizer.learning_rate = 0.3
            logs = {}
            warmup.on_epoch_end(epoch, logs)
            assert logs["learning_rate"] == near(0.4 if epoch == last else 0.3)


@pytest.mark.parametrize(("verbose", "rank"), [(1, 0), (1, 1), (0, 0)])
def test_the_root_says_when_a_warmup_is_over(verbose, rank, some_ranks, capsys):
    some_ranks.rank = some_ranks.fit_rank = lambda: rank
    warmup = begun(LearningRateWarmupCallback(0.4, 2, verbose=verbose))
    for epoch in range(3):
        warmup.on_epoch_end(epoch)
    said = "\nEpoch 2: finished gradual learning rate warmup to 0.4.\n"
    assert capsys.readouterr().out == (said if verbose and rank == 0 else "")


def test_a_warmup_takes_what_a_schedule_takes():
    warmup = LearningRateWarmupCallback(0.4)
    usual = (warmup.warmup_epochs, warmup.end_epoch, warmup.start_epoch, warmup.verbose)
    assert usual == (5, 5, 0, 0)
    assert warmup.momentum_correction is True
    assert LearningRateWarmupCallback(0.4, momentum_correction=False).momentum_correction is False


# --- Errors


def test_rates_that_cannot_be_set_are_refused():
    with pytest.raises(errors.ArgumentError, match="Expected initial_lr to be a number"):
        LearningRateScheduleCallback(None, 0.1)
    cosine = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    with pytest.raises(errors.ArgumentError, match="Received: a LearningRateSchedule"):
        begun(LearningRateScheduleCallback(1.0, 1.0), cosine)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        only = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        several = keras.optimizers.MultiOptimizer(only)
        with pytest.raises(errors.ArgumentError, match="one learning rate, for LearningRateWarm"):
            begun(LearningRateWarmupCallback(1.0), several)
