"""GANs with their own train step and two optimizers."""

from itertools import chain

import keras
from keras import layers, ops
from small_training import FEATURES

NOISE, PIXELS = 2, FEATURES
BACKEND = keras.backend.backend()


class Turns(keras.Model):
    """A model with several optimizers, which take turns in a step.

    A JAX step receives all state, but that of further optimizers only among the variables that are
    not trained.
    """

    def turns(self, *data):
        """Yields `(loss, optimizer, network)` of each turn; the loss is a function."""
        raise NotImplementedError

    def train_step(self, *state_and_data):
        data = keras.utils.unpack_x_y_sample_weight(state_and_data[-1])
        data = [each for each in data if each is not None]
        if BACKEND == "jax":
            return self.step_of_jax(state_and_data[0], data)
        losses = [descend(*turn) for turn in self.turns(*data)]
        return {"loss": losses[0]}

    def step_of_jax(self, state, data):
        kinds = [
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer.variables,
            self.metrics_variables,
        ]
        given = list(zip(chain(*kinds), chain(*state), strict=True))
        with keras.StatelessScope(given) as scope:
            for turn in self.turns(*data):
                descend_of_jax(self, *turn)
        return {}, tuple([scope.get_current_value(one) for one in kind] for kind in kinds)


def descend(loss_of, optimizer, network):
    variables = network.trainable_variables
    if BACKEND == "torch":
        import torch

        for variable in variables:
            variable.value.grad = None
        loss = loss_of()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in variables], variables)
            return loss.detach()
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of()
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


def descend_of_jax(model, loss_of, optimizer, network):
    import jax

    weights, others = network.trainable_variables, model.non_trainable_variables
    held = [(one, one.value) for one in [*model.trainable_variables, *others]]

    def run(values):
        with keras.StatelessScope([*held, *zip(weights, values, strict=True)]) as scope:
            loss = loss_of()
        return loss, [scope.get_current_value(one) for one in others]

    before = [one.value for one in weights]
    (_, after), gradients = jax.value_and_grad(run, has_aux=True)(before)
    assign(others, after)
    state = [one.value for one in optimizer.variables]
    stepped, state = optimizer.stateless_apply(state, gradients, before)
    assign([*weights, *optimizer.variables], [*stepped, *state])


def assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class TwoOptimizers(Turns):
    """A generator and a discriminator, each with an optimizer passed to `compile`.

    The optimizers are built at their first steps.

    Args:
        patience: steps of the discriminator before the first step of the generator; requires
            eager execution if not 0.
        seed: seed of the discriminator's dropout.
    """

    def __init__(self, patience=0, seed=5):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((NOISE,)), layers.Dense(PIXELS)])
        self.judge = keras.Sequential(
            [keras.Input((PIXELS,)), layers.Dropout(0.3, seed=seed), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(11)
        self.patience = patience
        self.d_optimizer = self.g_optimizer = None
        self.built = BACKEND != "tensorflow" or patience > 0  # which requires an unbuilt model

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def non_trainable_variables(self):
        found = super().non_trainable_variables
        if BACKEND != "jax" or self.d_optimizer is None:
            return found
        # Requested here before the first step.
        for _, optimizer, network in self.turns(None):
            if not optimizer.built:
                optimizer.build(network.trainable_variables)
        return [*self.d_optimizer.variables, *self.g_optimizer.variables, *found]

    def turns(self, real):
        def made():
            noise = keras.random.normal((ops.shape(real)[0], NOISE), seed=self.seeds)
            return self.judge(self.maker(noise, training=True), training=True)

        def loss_of_judge():
            judged = ops.mean(ops.softplus(-self.judge(real, training=True)))
            return judged + ops.mean(ops.softplus(made()))

        yield loss_of_judge, self.d_optimizer, self.judge
        if not self.patience or int(self.d_optimizer.iterations) > self.patience:
            yield lambda: ops.mean(ops.softplus(-made())), self.g_optimizer, self.maker


class Gan(Turns):
    """A generator and a discriminator, each with its own optimizer, on data and noise."""

    def __init__(self, wrap=lambda optimizer: optimizer):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.maker = keras.Sequential([keras.Input((NOISE,)), layers.Dense(PIXELS)])
        self.judge = keras.Sequential([keras.Input((PIXELS,)), layers.Dense(1)])
        self.judging = wrap(keras.optimizers.SGD(0.1, momentum=0.9))
        self.compile(wrap(keras.optimizers.Adam(0.01)))
        if BACKEND == "jax":  # a JAX step receives all state, so it must exist
            self.judging.build(self.judge.trainable_variables)
            self.optimizer.build(self.maker.trainable_variables)
        self.built = True

    @property
    def non_trainable_variables(self):
        return [*self.judging.variables, *super().non_trainable_variables]

    def turns(self, real, noise):
        def loss_of_judge():
            judged = ops.mean(ops.softplus(-self.judge(real)))
            return judged + ops.mean(ops.softplus(self.judge(self.maker(noise))))

        def loss_of_maker():
            return ops.mean(ops.softplus(-self.judge(self.maker(noise))))

        yield loss_of_judge, self.judging, self.judge
        yield loss_of_maker, self.optimizer, self.maker
