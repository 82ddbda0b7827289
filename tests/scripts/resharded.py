"""Trains with a backup, and may be killed: resharded.py FOLDER sharded|whole kill|go."""

import hashlib
import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import keras_dist

folder, shards, kills = sys.argv[1], sys.argv[2] == "sharded", sys.argv[3] == "kill"
keras_dist.init()
ours: Any = keras_dist.callbacks
keras.utils.set_random_seed(1)


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if kills and keras_dist.rank() == 1 and int(self.model.optimizer.iterations) == 7:
            os.kill(os.getpid(), signal.SIGKILL)


x = np.random.default_rng(0).standard_normal((240, 7)).astype("float32")
data = keras_dist.data.shard((x, x[:, :3]), batch_size=8)
layers = [keras.Input((7,)), keras.layers.Dense(301, "relu"), keras.layers.Dense(3)]
model = keras.Sequential(layers)
model.compile(
    keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=shards), "mse"
)
backup = ours.BackupAndRestore(folder, save_freq=2)
model.fit(data, epochs=2, verbose=0, callbacks=ours(backup, Kill()))
if keras_dist.rank() == 0:
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    print("ended after", int(model.optimizer.iterations), hashlib.sha256(weights).hexdigest())
