"""Helpers of the tests of local steps: models, data of each rank, and updates of loops."""

import keras
from small_training import CLASSES, FEATURES, compiled, make_data

import keras_dist
from keras_dist import LocalSteps

BACKEND = keras.backend.backend()
STEPS, BATCH = 7, 4


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


def loss_of(model, x, y):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))


def tf_update(model, optimizer, x, y):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def torch_update(model, optimizer, x, y):
    import torch

    model.zero_grad()
    loss_of(model, x, y).backward()
    with torch.no_grad():
        gradients = [variable.value.grad for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)


def jax_update(model, optimizer, x, y):
    import jax

    def loss(trainable, fixed):
        outputs, _ = model.stateless_call(trainable, fixed, x)
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs))

    values = [v.value for v in model.trainable_variables]
    gradients = jax.grad(loss)(values, [v.value for v in model.non_trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)


update_of_loop = {"tensorflow": tf_update, "jax": jax_update, "torch": torch_update}[BACKEND]
