"""Several fits, models and optimizers in one script: each trains as if alone."""

import keras
import numpy as np
import pytest
from small_training import (
    BATCH,
    FEATURES,
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

pytestmark = pytest.mark.jobs("training", "jax-2-rows")

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


class Gan(keras.Model):
    """A generator and a discriminator, each with its own optimizer.

    A JAX train step receives the state of the compiled optimizer only, so the state of the other
    optimizer is passed with the non-trainable variables.
    """

    def __init__(self, wrap=lambda optimizer: optimizer):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.maker = keras.Sequential([keras.Input((2,)), keras.layers.Dense(FEATURES)])
        self.judge = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        self.judging = wrap(keras.optimizers.SGD(0.1, momentum=0.9))
        self.compile(wrap(keras.optimizers.Adam(0.01)))
        if BACKEND == "jax":  # a JAX step receives all state, so it must exist
            self.judging.build(self.judge.trainable_variables)
            self.optimizer.build(self.maker.trainable_variables)
        self.built = True

    def losses_of(self, real, noise):
        made, softplus = self.judge(self.maker(noise)), keras.ops.softplus
        judged = keras.ops.mean(softplus(-self.judge(real))) + keras.ops.mean(softplus(made))
        return judged, keras.ops.mean(softplus(-made))

    def train_step(self, *arguments):
        real, noise = arguments[-1]
        if BACKEND == "jax":
            return self.step_of_jax(arguments[0], real, noise)
        if BACKEND == "torch":
            import torch

            for loss, optimizer, network in self.turns():
                self.zero_grad()
                loss(real, noise).backward()
                variables = network.trainable_weights
                with torch.no_grad():
                    optimizer.apply([v.value.grad for v in variables], variables)
            return {}
        import tensorflow as tf

        for loss, optimizer, network in self.turns():
            with tf.GradientTape() as tape:
                value = loss(real, noise)
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(value, variables), variables)
        return {"loss": value}

    def turns(self):
        yield lambda *data: self.losses_of(*data)[0], self.judging, self.judge
        yield lambda *data: self.losses_of(*data)[1], self.optimizer, self.maker

    def step_of_jax(self, state, real, noise):
        import jax

        trainable, others, making, metrics = state
        maker, judge = trainable[:2], trainable[2:]
        judging, others = (
            others[: len(self.judging.variables)],
            others[len(self.judging.variables) :],
        )

        def loss(number):
            def of(maker, judge):
                values = zip(self.trainable_variables, [*maker, *judge], strict=True)
                with keras.StatelessScope(list(values)):
                    return self.losses_of(real, noise)[number]

            return of

        gradients = jax.grad(loss(0), 1)(maker, judge)
        judge, judging = self.judging.stateless_apply(judging, gradients, judge)
        gradients = jax.grad(loss(1), 0)(maker, judge)
        maker, making = self.optimizer.stateless_apply(making, gradients, maker)
        return {}, ([*maker, *judge], [*judging, *others], making, metrics)

    @property
    def non_trainable_variables(self):
        return [*self.judging.variables, *super().non_trainable_variables]


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
