"""A `fit` that goes on until a file is there, and checks the scalars that it has written."""

import os
import pathlib
import sys
import time
from typing import Any

import keras
import numpy as np

import keras_dist

keras_dist.init()
ours: Any = keras_dist.callbacks
folder = pathlib.Path(sys.argv[1])
(folder / f"rank-{keras_dist.rank()}").write_text(str(os.getpid()))


class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = (folder / "end").exists()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
x = np.ones((64, 4), "float32")
callbacks = ours(ours.WriteScalars(folder / "logs", 0.5), Slow())
model.fit(x, x[:, :1], batch_size=8, epochs=500, verbose=0, callbacks=callbacks)
if keras_dist.rank() == 0:
    import tensorflow as tf

    (path,) = (folder / "logs").iterdir()
    events = list(tf.compat.v1.train.summary_iterator(str(path)))
    assert events[0].file_version == "brain.Event:2"
    steps = [event.step for event in events[1:]]
    assert steps == sorted(steps) and steps[-1] > steps[0]
    tags = {value.tag for event in events for value in event.summary.value}
    (folder / "tags").write_text("|".join(tags))
