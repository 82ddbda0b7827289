"""A network of two halves, one on each of two ranks; with four ranks, two of them side by side.

mpirun -np 2 python examples/model_parallel/mlp.py
mpirun -np 4 python examples/model_parallel/mlp.py
"""

import argparse

import keras
import numpy as np
from keras import layers, ops

import keras_dist

STAGES = 2
POINTS = 1024
UNITS = 32

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64, help="of one pipeline")
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()
if options.epochs < 1:
    parser.error("--epochs has to be 1 or more")

keras_dist.init()
rank, replicas = keras_dist.rank(), keras_dist.size() // STAGES
if keras_dist.size() != STAGES * replicas or replicas < 1:
    parser.error(f"the number of ranks has to be a multiple of {STAGES}")
mine = POINTS // replicas  # of each pipeline
if not 1 <= options.micro_batches <= min(options.batch_size, mine):
    parser.error(f"--micro-batches has to be 1 or more, and no more than --batch-size and {mine}")
replica, stage = divmod(rank, STAGES)
is_last = stage == STAGES - 1

# All ranks make all sets, in the same order: one for the replicas of each stage.
same_stage = [
    keras_dist.add_process_set(range(first, keras_dist.size(), STAGES)) for first in range(STAGES)
]

keras.utils.set_random_seed(stage)  # replicas of a stage begin with the same weights
HALVES = (
    [keras.Input((2,)), layers.Dense(UNITS, "tanh"), layers.Dense(UNITS, "tanh")],
    [keras.Input((UNITS,)), layers.Dense(UNITS, "tanh"), layers.Dense(1, "sigmoid")],
)
model = keras.Sequential(HALVES[stage])
optimizer = keras_dist.DistributedOptimizer(
    keras.optimizers.Adam(options.lr), process_set=same_stage[stage]
)


def stage_loss(x, y):
    """Passes micro-batches through the stage; returns the mean loss, on the last stage."""
    total = 0.0
    for inputs, targets in zip(split(x), split(y), strict=True):
        if stage > 0:
            # The gradient of what is received is sent back, as it depends on a weight of the stage.
            like = ops.zeros((len(inputs), 1)) + ops.sum(model.trainable_variables[0], axis=1)
            inputs = keras_dist.recv(rank - 1, like=like)
        outputs = model(inputs, training=True)
        if is_last:
            losses = keras.losses.binary_crossentropy(ops.convert_to_tensor(targets), outputs)
            total += ops.sum(losses) / len(x)
        else:  # a zero, whose gradient is received from the next stage
            total += keras_dist.send(outputs, rank + 1)
    return total


def split(array):
    return np.array_split(array, options.micro_batches)


def gradients_of(loss):
    """Returns the value of a function and its gradients by the weights, on any backend."""
    weights = [variable.value for variable in model.trainable_variables]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, weights)
    if keras.backend.backend() == "jax":
        import jax

        def loss_at(values):
            with keras.StatelessScope(zip(model.trainable_variables, values, strict=True)):
                return loss()

        return jax.value_and_grad(loss_at)(weights)
    import torch

    value = loss()
    return value, torch.autograd.grad(value, weights)


# Two rings, one inside the other. Each pipeline learns from every `replicas`-th point of them.
random = np.random.default_rng(0)
y = random.integers(0, 2, (POINTS, 1)).astype("float32")
angle, radius = random.uniform(0, 2 * np.pi, POINTS), 0.5 + y[:, 0]
x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype("float32")
x, y = x[replica::replicas][:mine], y[replica::replicas][:mine]

for epoch in range(options.epochs):
    order = np.random.default_rng(epoch).permutation(len(x))
    for part in np.split(order, range(options.batch_size, mine, options.batch_size)):
        if len(part) >= options.micro_batches:  # what is left at the end may be too little to cut
            loss, gradients = gradients_of(lambda part=part: stage_loss(x[part], y[part]))
            optimizer.apply(gradients, model.trainable_variables)
    if rank == STAGES - 1:
        print(
            f"Epoch {epoch + 1}/{options.epochs}: loss {ops.convert_to_numpy(loss):.3f}", flush=True
        )

inputs = x if stage == 0 else keras_dist.recv(rank - 1)
outputs = model.predict_on_batch(inputs)
if not is_last:
    keras_dist.send(outputs, rank + 1)
right = float(((outputs > 0.5) == y).mean()) if is_last else None
shares = [share for share in keras_dist.allgather_object(right) if share is not None]
if rank == 0:
    print(
        f"Trained {replicas} pipeline{'s' if replicas > 1 else ''} of {STAGES} stages: "
        f"{100 * np.mean(shares):.1f}% right."
    )
