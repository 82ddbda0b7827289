"""The learning rate over batches and epochs: warmup, schedules, momentum."""

import keras
import numpy as np
import pytest
from small_training import distributed, make_data, make_model

import keras_dist
from keras_dist import errors
from keras_dist.callbacks import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)

pytestmark = pytest.mark.jobs("hooks", "jax-2")


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


@pytest.mark.parity("learning rate warmup")
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


def test_a_warmup_and_three_schedules_one_after_the_other():
    rate = 0.1 * keras_dist.size()
    rates = rates_of(
        LearningRateWarmupCallback(rate, 5),
        LearningRateScheduleCallback(rate, 1e-1, start_epoch=5, end_epoch=10),
        LearningRateScheduleCallback(rate, 1e-2, start_epoch=10, end_epoch=15),
        LearningRateScheduleCallback(rate, lambda epoch: epoch, start_epoch=15, end_epoch=20),
        epochs=20,
    )
    assert (rates[:5] <= rate * (1 + 1e-6)).all() and rates[0, 0] <= rates[4, 4]
    np.testing.assert_allclose(rates[5:10], rate * 1e-1, rtol=1e-6)
    np.testing.assert_allclose(rates[10:15], rate * 1e-2, rtol=1e-6)
    np.testing.assert_allclose(rates[15:, 0], rate * np.arange(15, 20), rtol=1e-6)


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


def test_a_rate_of_zero_leaves_the_velocity_for_the_rates_that_follow():
    model = distributed(keras.optimizers.SGD(1.0, momentum=0.9))
    model.optimizer.build(model.trainable_variables)
    velocity = model.optimizer.momentums[0]
    velocity.assign(keras.ops.ones(velocity.shape))
    rates = [0.0, 0.0, 0.5, 2.0]
    schedule = LearningRateScheduleCallback(1.0, lambda epoch: rates[int(epoch)])
    schedule.set_model(model)
    for epoch, factor in enumerate([1.0, 1.0, 0.5, 2.0]):
        schedule.on_epoch_begin(epoch)
        schedule.on_train_batch_begin(0)
        assert (keras.ops.convert_to_numpy(velocity) == factor).all()


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


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="an earlier Keras")
def test_several_learning_rates_are_refused():
    rates = {".*/bias": keras.optimizers.Adam(0.01)}
    each = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), rates)
    model = distributed(keras.optimizers.MultiOptimizer(each))
    with pytest.raises(errors.ArgumentError, match="with one learning rate"):
        model.fit(*make_data(8), verbose=0, callbacks=[LearningRateScheduleCallback(0.1, 1.0)])
