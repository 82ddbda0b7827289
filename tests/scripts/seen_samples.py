"""Trains until a step, and goes on from a backup: seen_samples.py FOLDER BATCH STOP."""

import contextlib
import itertools
import json
import sys
from typing import Any

import keras
import numpy as np
import torch

import keras_dist

directory, batch, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
keras_dist.init()
ours: Any = keras_dist.callbacks
seen: list[list[int]] = []


class Model(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        seen.append(data[0][:, 0].int().tolist())
        return super().train_step(data)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if stop and len(seen) == stop:
            raise InterruptedError


x = np.arange(120, dtype="float32").reshape(-1, 1)
sources: Any = ((x, x), torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(x)))
for data in sources:
    seen.clear()
    train = keras_dist.data.shard(data, batch, shuffle="global")
    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1e-9))
    model.compile(optimizer, "mse", run_eagerly=True)
    backup = ours.BackupAndRestore(f"{directory}/{type(data).__name__}", save_freq=3)
    with contextlib.suppress(InterruptedError):
        model.fit(train, epochs=2, verbose=0, callbacks=ours(backup, Stop()))
    steps = [
        [*itertools.chain(*step)] for step in zip(*keras_dist.allgather_object(seen), strict=True)
    ]
    if keras_dist.rank() == 0:
        print("SEEN", json.dumps(steps))
