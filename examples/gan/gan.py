"""A generative adversarial network: two networks against each other, each with its optimizer.

Its train step is its own, for each backend. It knows nothing of ranks: that the optimizers are
distributed is all it takes.
"""

import keras
from keras import layers, ops

NOISE = 32
BACKEND = keras.backend.backend()


class Gan(keras.Model):
    """A maker of images and a judge, who tells real images from those made of noise."""

    def __init__(self, image_shape):
        super().__init__()
        self.maker = keras.Sequential(
            [
                keras.Input((NOISE,)),
                layers.Dense(128, activation="relu"),
                layers.Dense(image_shape[0] * image_shape[1], activation="sigmoid"),
                layers.Reshape(image_shape),
            ]
        )
        self.judge = keras.Sequential(
            [
                keras.Input(image_shape),
                layers.Flatten(),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        self.for_judge = None
        self.seeds = keras.random.SeedGenerator()
        self.judge_loss = keras.metrics.Mean("judge_loss")
        self.maker_loss = keras.metrics.Mean("maker_loss")
        self.built = True

    def compile(self, for_maker, for_judge):
        """Takes an optimizer for each of the networks."""
        super().compile(for_maker, jit_compile=BACKEND == "jax")
        self.for_judge = for_judge
        if BACKEND == "jax":  # whose steps are given all state, so it has to be there
            for_maker.build(self.maker.trainable_variables)
            for_judge.build(self.judge.trainable_variables)

    @property
    def metrics(self):
        return [self.judge_loss, self.maker_loss]

    @property
    def non_trainable_variables(self):
        # A train step of JAX is given the variables of the compiled optimizer, and these.
        judging = [] if self.for_judge is None else self.for_judge.variables
        return [*judging, *super().non_trainable_variables]

    def turns(self, images):
        """What is done in a step: metric, optimizer, network, and its loss."""

        def made():
            noise = keras.random.normal((ops.shape(images)[0], NOISE), seed=self.seeds)
            return self.judge(self.maker(noise, training=True), training=True)

        def loss_of_judge():
            real = self.judge(images, training=True)
            return ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(made()))

        def loss_of_maker():
            return ops.mean(ops.softplus(-made()))

        yield self.judge_loss, self.for_judge, self.judge, loss_of_judge
        yield self.maker_loss, self.optimizer, self.maker, loss_of_maker

    def train_step(self, *state_and_data):
        images, _, _ = keras.utils.unpack_x_y_sample_weight(state_and_data[-1])
        if BACKEND == "jax":
            import jax_step

            return jax_step.train_step(self, state_and_data[0], images)
        for metric, optimizer, network, loss_of in self.turns(images):
            metric.update_state(descend(optimizer, network, loss_of))
        return {metric.name: metric.result() for metric in self.metrics}


def descend(optimizer, network, loss_of):
    """Makes one step of an optimizer down a loss of a network; returns the loss."""
    variables = network.trainable_variables
    if BACKEND == "torch":
        import torch

        loss = loss_of()
        gradients = torch.autograd.grad(loss, [variable.value for variable in variables])
        with torch.no_grad():
            optimizer.apply(gradients, variables)
            return loss.detach()
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of()
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss
