"""Several fits, models and optimizers in one script: each trains as if alone."""

import keras
import numpy as np
import pytest
from gans import Gan
from small_training import (
    BATCH,
    STEPS,
    agreed,
    assert_close,
    compiled,
    fit_rows,
    global_data,
    make_model,
    rows_of_rank,
    weights_of,
)

import keras_dist

pytestmark = pytest.mark.jobs("training", "jax-2")

BACKEND = keras.backend.backend()


def test_a_second_fit_continues_the_schedule_of_the_first():
    def adamw():
        decay = keras.optimizers.schedules.CosineDecay(0.01, STEPS)
        return keras.optimizers.AdamW(decay, weight_decay=0.1)

    x, y = global_data()
    model, plain = make_model(keras_dist.DistributedOptimizer(adamw())), make_model(adamw())
    half = len(x) // 2
    for part in (slice(half), slice(half, None)):
        plain.fit(x[part], y[part], BATCH * keras_dist.size(), shuffle=False, verbose=0)
        fit_rows(model, rows_of_rank(x[part], BATCH), rows_of_rank(y[part], BATCH))
    keras_dist.verify_replicas(model)
    assert int(model.optimizer.iterations) == STEPS
    assert_close(weights_of(model), weights_of(plain))


def test_alternating_models_and_a_cloned_model():
    x, y = global_data()
    own_x, own_y = rows_of_rank(x, BATCH), rows_of_rank(y, BATCH)
    model = make_model(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    start = model.get_weights()
    clone = keras.models.clone_model(model)
    clone.set_weights(start)
    copied = type(model.optimizer).from_config(model.optimizer.get_config())
    compiled(clone, keras_dist.DistributedOptimizer(copied))
    plain = make_model(keras.optimizers.SGD(0.1))
    batches = [slice(step * BATCH, (step + 1) * BATCH) for step in range(STEPS)]
    for rows, others in zip(batches, batches[::-1], strict=True):
        model.train_on_batch(own_x[rows], own_y[rows])
        clone.train_on_batch(own_x[others], own_y[others])
    for one, order in ((model, range(STEPS)), (clone, range(STEPS)[::-1])):
        keras_dist.verify_replicas(one)
        plain.set_weights(start)
        for step in order:
            plain.train_on_batch(np.split(x, STEPS)[step], np.split(y, STEPS)[step])
        assert_close(weights_of(one), weights_of(plain))


@pytest.mark.parity("two optimizers in one `train_step`, as in a GAN")
def test_two_optimizers_in_one_train_step():
    n = keras_dist.size()
    real, _ = global_data()
    noise = np.random.default_rng(2).standard_normal((len(real), 2)).astype("float32")
    plain, model = Gan(), Gan(keras_dist.DistributedOptimizer)
    plain.fit(real, noise, batch_size=BATCH * n, shuffle=False, verbose=0)
    fit_rows(model, rows_of_rank(real, BATCH), rows_of_rank(noise, BATCH))
    assert agreed([weight.tobytes() for weight in weights_of(model)])
    assert agreed([np.array(v).tobytes() for v in model.judging.variables])
    assert int(model.judging.iterations) == int(model.optimizer.iterations) == STEPS
    assert_close(weights_of(model), weights_of(plain))


def test_each_of_two_optimizers_under_a_loss_scale_skips_its_own_steps():
    n = keras_dist.size()
    real, _ = global_data()
    real[BATCH * n - 1] = np.inf  # first step, last rank
    noise = np.random.default_rng(2).standard_normal((len(real), 2)).astype("float32")

    def scaled(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer, 1.0)

    plain, model = Gan(scaled), Gan(lambda one: scaled(keras_dist.DistributedOptimizer(one)))
    plain.fit(real, noise, batch_size=BATCH * n, shuffle=False, verbose=0)
    fit_rows(model, rows_of_rank(real, BATCH), rows_of_rank(noise, BATCH))
    keras_dist.verify_replicas(model)
    for one in (plain, model):  # only the discriminator's loss overflows
        assert (int(one.judging.iterations), int(one.optimizer.iterations)) == (STEPS - 1, STEPS)
    assert_close(weights_of(model), weights_of(plain))
