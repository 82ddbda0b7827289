"""y = w0 * x0 + w1 * x1 + w2 * x2, of which each rank has one weight and one input.

Each rank adds its product to the sum so far and sends it on; the last one knows the target, and
gradients come back the same way.

    mpirun -np 3 python examples/model_parallel/products.py
"""

import keras
import numpy as np
from keras import ops

import keras_dist

STEPS, RATE = 80, 0.1

keras_dist.init()
rank, last = keras_dist.rank(), keras_dist.size() - 1
inputs = np.random.default_rng(0).normal(size=(last + 1, 64)).astype("float32")
truth = np.arange(1.0, last + 2, dtype="float32")
weight = keras.Variable(0.0)


def loss_of(weight):
    y = weight * ops.convert_to_tensor(inputs[rank])
    if rank > 0:
        y = y + keras_dist.recv(source=rank - 1, like=y)
    if rank < last:
        return keras_dist.send(y, destination=rank + 1)
    return ops.mean((y - ops.convert_to_tensor(truth @ inputs)) ** 2)


def gradient():
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(weight.value)
        return tape.gradient(loss, weight.value)
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(loss_of)(weight.value)
    import torch

    return torch.autograd.grad(loss_of(weight.value), weight.value)[0]


for _ in range(STEPS):
    weight.assign_sub(RATE * gradient())

found = keras_dist.allgather_object(float(ops.convert_to_numpy(weight)))
if rank == 0:
    print("Weights found by", last + 1, "ranks:", *(f"{value:.3f}" for value in found))
