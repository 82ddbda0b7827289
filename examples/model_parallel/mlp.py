"""A network of two halves, one on each of two ranks; with four ranks, two of them side by side.

mpirun -np 2 python examples/model_parallel/mlp.py
mpirun -np 4 python examples/model_parallel/mlp.py
"""

import argparse

import keras
import numpy as np
from keras import layers

import keras_dist

STAGES = 2
POINTS = 1024

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64, help="of one pipeline")
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()
if options.epochs < 1:
    parser.error("--epochs has to be 1 or more")

keras_dist.init()
replicas = keras_dist.size() // STAGES
if keras_dist.size() != STAGES * replicas or replicas < 1:
    parser.error(f"the number of ranks has to be a multiple of {STAGES}")
mine = POINTS // replicas  # of each pipeline
if not 1 <= options.micro_batches <= min(options.batch_size, mine):
    parser.error(f"--micro-batches has to be 1 or more, and no more than --batch-size and {mine}")
replica, stage = divmod(keras_dist.rank(), STAGES)

# All ranks make all sets, in the same order: one for the replicas of each stage.
same_stage = [
    keras_dist.add_process_set(range(first, keras_dist.size(), STAGES)) for first in range(STAGES)
]

keras.utils.set_random_seed(stage)  # replicas of a stage begin with the same weights
HALVES = (
    [keras.Input((2,)), layers.Dense(32, "tanh"), layers.Dense(32, "tanh")],
    [keras.Input((32,)), layers.Dense(32, "tanh"), layers.Dense(1, "sigmoid")],
)
model = keras.Sequential(HALVES[stage])
optimizer = keras_dist.DistributedOptimizer(
    keras.optimizers.Adam(options.lr), process_set=same_stage[stage]
)
pipeline = keras_dist.Pipeline(
    model,
    optimizer,
    "binary_crossentropy",
    micro_batches=options.micro_batches,
    ranks=range(replica * STAGES, (replica + 1) * STAGES),
)

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
            loss = pipeline.train_on_batch(x[part], y[part])
    if keras_dist.rank() == 0:
        print(f"Epoch {epoch + 1}/{options.epochs}: loss {loss:.3f}", flush=True)

outputs = pipeline.predict_on_batch(x)
right = None if outputs is None else float(((outputs > 0.5) == y).mean())
shares = [share for share in keras_dist.allgather_object(right) if share is not None]
if keras_dist.rank() == 0:
    print(
        f"Trained {replicas} pipeline{'s' if replicas > 1 else ''} of {STAGES} stages: "
        f"{100 * np.mean(shares):.1f}% right."
    )
