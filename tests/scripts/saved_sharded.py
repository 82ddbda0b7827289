"""Saves a sharded checkpoint, or loads and goes on: saved_sharded.py FOLDER save|load."""

import hashlib
import sys
from typing import Any

import keras
import numpy as np

import keras_dist
from keras_dist.training import model_state
from keras_dist.training.sharded_state import whole_value

folder, saves = sys.argv[1], sys.argv[2] == "save"
keras_dist.init()
ours: Any = keras_dist.callbacks
keras.utils.set_random_seed(1 + saves)
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


if saves:
    fit(2)
    digest = bits()
else:
    epoch = keras_dist.checkpoints.load(model, folder)
    digest = bits()
    fit(epoch)  # restores everything, and trains no epoch
    assert bits() == digest
    fit(epoch + 1)
    assert bits() != digest
    keras_dist.verify_replicas(model)
digests = keras_dist.allgather_object(digest)
assert len(set(digests)) == 1
if keras_dist.rank() == 0:
    print("bits", digest)
