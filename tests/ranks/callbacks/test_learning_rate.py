"""The learning rate over the batches of a fit; tests/unit/callbacks has the formulas."""

import keras
import numpy as np
import pytest
from small_training import distributed, make_data, make_model

import keras_dist
from keras_dist.callbacks import LearningRateScheduleCallback, LearningRateWarmupCallback

pytestmark = pytest.mark.jobs("torch-2")


class Rates(keras.callbacks.Callback):
    """Records the rate with which each batch was trained."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(np.array(self.model.optimizer.learning_rate)))


def rates_of(*callbacks, model, epochs, steps=5, **fit_options):
    recorder = Rates()
    x, y = make_data(4 * steps)
    callbacks = [*callbacks, recorder]
    options = {"batch_size": 4, "epochs": epochs, "verbose": 0, "callbacks": callbacks}
    model.fit(x, y, **options, **fit_options)
    return np.array(recorder.rates).reshape(-1, steps)


@pytest.mark.long
@pytest.mark.jobs("tensorflow-2", "jax-2")
@pytest.mark.parity("learning rate warmup")
def test_warmup_rates_equal_the_formula_at_every_batch_of_every_fit():
    n, steps, rate = keras_dist.size(), 5, 0.1 * keras_dist.size()
    model = distributed(keras.optimizers.SGD(0.5, momentum=0.9))
    rates = rates_of(LearningRateWarmupCallback(rate, 2.5), model=model, epochs=3)
    for epoch in range(3):
        for batch in range(steps):
            done = min(epoch + (batch + 1) / steps, 2.5)
            expected = rate / n * (1 + done * (n - 1) / 2.5)
            assert rates[epoch, batch] == pytest.approx(expected, rel=1e-6)
    assert rates[-1, -1] == pytest.approx(rate, rel=1e-7)
    again = LearningRateWarmupCallback(rate, 2.5)
    resumed = rates_of(again, model=model, epochs=3, initial_epoch=2)
    np.testing.assert_array_equal(resumed[0], rates[2])
    warmup = LearningRateWarmupCallback(rate, 1)
    for steps in (5, 2):  # those of each fit
        assert rates_of(warmup, model=model, epochs=2, steps=steps)[-1, -1] == pytest.approx(rate)


@pytest.mark.jobs("jax-2")  # whose `fit` holds the velocity elsewhere
def test_momentum_correction_scales_the_velocity():
    """By hand: v <- 0.9 (new / old) v - new g, w <- w + v, with a gradient of 1 throughout."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    model.compile(keras_dist.DistributedOptimizer(optimizer), loss=lambda y, p: p)
    schedule = LearningRateScheduleCallback(1.0, lambda epoch: [1.0, 0.5, 0.5][int(epoch)])
    x = np.ones((4, 1), "float32")
    logs = model.fit(x, x, batch_size=4, epochs=3, verbose=0, callbacks=[schedule]).history
    weight = velocity = 0.0
    for rate, ratio in ((1.0, 1.0), (0.5, 0.5), (0.5, 1.0)):
        velocity = 0.9 * ratio * velocity - rate
        weight += velocity
    assert float(np.array(model.layers[0].kernel)[0, 0]) == pytest.approx(weight, rel=1e-6)
    assert logs["learning_rate"] == pytest.approx([1.0, 0.5, 0.5])


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


@pytest.mark.jobs("tensorflow-2", "jax-2")
def test_a_warmup_ends_at_its_rate_with_several_steps_per_execution():
    if keras.backend.backend() == "torch":
        pytest.skip("Keras on torch has no steps_per_execution")
    model = distributed(keras.optimizers.SGD(1.0), steps_per_execution=4)
    callbacks = keras_dist.callbacks(warmup_epochs=1, initial_lr=0.1)
    history = model.fit(*make_data(32), batch_size=4, verbose=0, callbacks=callbacks).history
    assert history["learning_rate"] == [pytest.approx(0.1)]
