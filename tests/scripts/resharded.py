"""Trains with backups until a rank is killed: resharded.py FOLDER kill, and goes on: FOLDER go."""

import hashlib
import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import keras_dist

folder, is_killed = sys.argv[1], sys.argv[2] == "kill"
keras_dist.init()
ours: Any = keras_dist.callbacks
x = np.random.default_rng(0).standard_normal((240, 7)).astype("float32")


class Interrupted(Exception):
    """Ends a fit on all ranks."""


class End(keras.callbacks.Callback):
    """Ends a fit after some steps; one of a sharded model by the death of a rank."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) < 7:
            return
        if not self.dies:
            raise Interrupted
        if keras_dist.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(how: str) -> str:
    """Returns the number of steps of a model that is `"whole"` or `"sharded"`, and its weights."""
    is_sharded = how == "sharded"
    keras.utils.set_random_seed(1)
    data = keras_dist.data.shard((x, x[:, :3]), batch_size=8)
    layers = [keras.Input((7,)), keras.layers.Dense(301, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(
        keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=is_sharded), "mse"
    )
    backup = ours.BackupAndRestore(os.path.join(folder, how), save_freq=2)
    callbacks = [backup, End(dies=is_sharded)] if is_killed else [backup]
    model.fit(data, epochs=2, verbose=0, callbacks=ours(*callbacks))
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    return f"{int(model.optimizer.iterations)} steps: {hashlib.sha256(weights).hexdigest()}"


if is_killed:
    try:
        train("whole")
    except Interrupted:
        train("sharded")
else:
    ends = [train(how) for how in ("whole", "sharded")]
    if keras_dist.rank() == 0:
        print("ended after", *ends, flush=True)
