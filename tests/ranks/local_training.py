"""Helpers of the tests of local steps: models, data of each rank, updates of loops, a reference."""

import functools

import keras
import numpy as np
from small_training import CLASSES, FEATURES, compiled, make_data, weights_of

import keras_dist
from keras_dist import LocalSteps
from keras_dist.training.fragments import cut

BACKEND = keras.backend.backend()
STEPS, BATCH = 7, 4
HELD = 0.5  # share of its own weights that a rank keeps where averages are late


def make(optimizer, normalized=False, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh")]
    if normalized:
        layers += [keras.layers.BatchNormalization(momentum=0.5)]
    layers += [keras.layers.Dense(CLASSES, activation="softmax")]
    return compiled(keras.Sequential(layers), optimizer, **options)


def local(optimizer, *args, compression="none", **options):
    steps = LocalSteps(*args, **options)
    return keras_dist.DistributedOptimizer(optimizer, local_steps=steps, compression=compression)


def data_of(rank):
    return make_data(STEPS * BATCH, seed=10 + rank)


def fit(model, epochs=1, callbacks=(), **options):
    x, y = data_of(keras_dist.rank())
    added = keras_dist.callbacks(*callbacks)
    return model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=added, **options)


def batches_of(rank):
    x, y = data_of(rank)
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]


class Stop(keras.callbacks.Callback):
    """Stops training on the last rank after a batch, in the middle of a round."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and keras_dist.rank() == keras_dist.size() - 1:
            self.model.stop_training = True


# --- Updates of loops


def loss_of(model, x, y):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))


def tf_update(model, x, y):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def torch_update(model, x, y):
    import torch

    model.zero_grad()
    loss_of(model, x, y).backward()
    with torch.no_grad():
        gradients = [variable.value.grad for variable in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)


def jax_update(model, x, y):
    import jax

    def loss(trainable, fixed):
        outputs, _ = model.stateless_call(trainable, fixed, x)
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs))

    values = [v.value for v in model.trainable_variables]
    gradients = jax.grad(loss)(values, [v.value for v in model.non_trainable_variables])
    model.optimizer.apply(gradients, model.trainable_variables)


update_of_loop = {"tensorflow": tf_update, "jax": jax_update, "torch": torch_update}[BACKEND]


def graph_of(model):
    """Returns the update of a loop in a graph of TensorFlow."""
    import tensorflow as tf

    update = tf.function(lambda x, y: tf_update(model, x, y))
    return lambda x, y: update(tf.constant(x), tf.constant(y))


def in_a_loop(model, in_graph=0):
    """Trains on the batches of this rank, as many of them in a graph as `in_graph` says."""
    traced = graph_of(model) if in_graph else None
    for number, (x, y) in enumerate(batches_of(keras_dist.rank())):
        if number < in_graph:
            traced(x, y)
        else:
            update_of_loop(model, x, y)
    model.optimizer.finish_round()


# How steps are taken besides `fit` as Keras compiles it.
WAYS = {"loop": in_a_loop}
if BACKEND == "tensorflow":  # others have no graph besides XLA
    WAYS["graph"] = functools.partial(in_a_loop, in_graph=STEPS)
    WAYS["graph, then outside of it"] = functools.partial(in_a_loop, in_graph=2)
if BACKEND != "torch":  # compiles for minutes
    WAYS["XLA"] = fit


# --- A reference


class Reference:
    """Trains the models of all ranks in this process, with rounds computed by numpy.

    Args:
        make_inner: makes the optimizer of the steps.
        length: the steps of a round.
        count: the number of fragments.
        delay: the steps while averages travel.
        rate: the learning rate of the outer optimizer, that of the paper.
        momentum: of the outer optimizer.
        normalized: whether the model has moving statistics.
        groups: the ranks that average in each step; each by itself by default.
    """

    def __init__(
        self,
        make_inner,
        length,
        count=1,
        delay=0,
        rate=1.0,
        momentum=0.5,
        normalized=False,
        groups=None,
    ):
        self.groups = groups or [[rank] for rank in range(keras_dist.size())]
        eager = {"run_eagerly": BACKEND == "tensorflow"}  # tracing takes longer than the steps
        self.models = [make(make_inner(), normalized, **eager) for _ in self.groups]
        weights = self.models[0].weights
        self.trained = [at for at, weight in enumerate(weights) if weight.trainable]
        parts = cut([weights[at] for at in self.trained], count)
        known = {id(weight): at for at, weight in enumerate(weights)}
        self.parts = [[known[id(weight)] for weight in part] for part in parts]
        self.parts[-1] += [at for at in range(len(weights)) if at not in self.trained]
        self.length, self.delay, self.rate, self.momentum = length, delay, rate, momentum
        self.anchors = [np.float64(w) for w in weights_of(self.models[0])]
        self.velocities = [np.zeros_like(anchor) for anchor in self.anchors]

    def epoch(self):
        sent, began = {}, [0] * len(self.parts)
        due = [(number + 1) * self.length // len(self.parts) for number in range(len(self.parts))]
        for step in range(1, STEPS + 1):
            for model, ranks in zip(self.models, self.groups, strict=True):
                batches = zip(*(batches_of(rank)[step - 1] for rank in ranks), strict=True)
                model.train_on_batch(*map(np.concatenate, batches))
            for number, part in enumerate(self.parts):
                if number in sent and step == began[number] + self.delay:
                    self.apply(part, sent.pop(number), HELD)
            for number, part in enumerate(self.parts):
                if step >= due[number] and (step - due[number]) % self.length == 0:
                    began[number] = step
                    if self.delay:
                        sent[number] = self.differences(part)
                    else:
                        self.apply(part, self.differences(part))
        for number, part in enumerate(self.parts):
            if number in sent:
                self.apply(part, sent[number], HELD if began[number] < STEPS else 0)
        for number, part in enumerate(self.parts):
            if began[number] < STEPS:
                self.apply(part, self.differences(part))

    def differences(self, part):
        counts = [len(ranks) for ranks in self.groups]
        every = [weights_of(model) for model in self.models]
        return [
            self.anchors[at] - np.average([mine[at] for mine in every], axis=0, weights=counts)
            for at in part
        ]

    def apply(self, part, differences, held=0.0):
        for at, difference in zip(part, differences, strict=True):
            step = difference
            if at in self.trained:
                self.velocities[at] = self.momentum * self.velocities[at] + difference
                step = self.rate * (difference + self.momentum * self.velocities[at])
            self.anchors[at] = self.anchors[at] - step
        for model in self.models:
            mine = weights_of(model)
            for at in part:
                mixed = held * mine[at] + (1 - held) * self.anchors[at]
                mine[at] = mixed.astype("float32")
            model.set_weights(mine)


def weights_of_reference(*args, epochs=1, **options):
    """Returns the weights of a `Reference` with these arguments after some epochs."""
    reference = Reference(*args, **options)
    for _ in range(epochs):
        reference.epoch()
    return reference.anchors
