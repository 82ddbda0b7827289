"""Goes on from the sharded checkpoint in a folder, if there is one, and saves another."""

import hashlib
import os
import sys
from typing import Any

import keras
import numpy as np

import keras_dist
from keras_dist.training import model_state
from keras_dist.training.sharded_state import whole_value

folder = sys.argv[1]
goes_on = os.path.exists(folder)
keras_dist.init()
ours: Any = keras_dist.callbacks
keras.utils.set_random_seed(1 + goes_on)
layers = [keras.Input((7,)), keras.layers.Dense(301, "relu"), keras.layers.BatchNormalization()]
model = keras.Sequential([*layers, keras.layers.Dropout(0.1), keras.layers.Dense(3)])
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
model.compile(optimizer, "mse")
x = np.random.default_rng(keras_dist.rank()).standard_normal((24, 7)).astype("float32")


def fit(epochs: int) -> None:
    checkpoint = ours.ShardedCheckpoint(folder)
    callbacks = ours(checkpoint)
    model.fit(x, x[:, :3], 8, epochs, shuffle=False, verbose=0, callbacks=callbacks)


def bits() -> str:
    found = hashlib.sha256()
    for variable in model_state.state(model):
        value: Any = whole_value(variable)
        found.update(value.astype("int64") if value.dtype.kind in "iu" else value)
    return found.hexdigest()


epoch, loaded = 0, "nothing"
if goes_on:
    epoch = keras_dist.checkpoints.load(model, folder)
    loaded = bits()
    fit(epoch)  # restores everything, and trains no epoch
    assert bits() == loaded
fit(epoch + 1)
saved = bits()
assert saved != loaded
keras_dist.verify_replicas(model)
digests = keras_dist.allgather_object((loaded, saved))
assert len(set(digests)) == 1
if keras_dist.rank() == 0:
    print(f"loaded {loaded}, saved {saved}")
