"""A `fit` that ranks join while it trains: in the place of others, or besides them.

growing_fit.py SETTINGS, in JSON: `size` of the job at its end, which comes two epochs after that
size has been reached behind the epoch `later`; `kills`, places and ranks; `starts`, the variables
of each process that is to join; whether one of them `refuses`; `on_failure`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from faults import FOLDER, die, fault, start_joining

import keras_dist
from keras_dist import config
from keras_dist.runtime import growth

given: dict[str, Any] = {"later": -1, "kills": [], "starts": [], "refuses": False}
given |= json.loads(sys.argv[1])
size, kills, starts = given["size"], given["kills"], given["starts"]
keras_dist.init()
joins = config.settings().joins
me = "joined" if joins else keras_dist.rank()
x = np.arange(96, dtype="float32")[:, None]
train = keras_dist.data.shard((x, x), batch_size=4)
test = keras_dist.data.shard((x, x), batch_size=4, shuffle=False)
# The samples of each step, before it trains on them: a rank that is killed at the begin of a batch
# has not.
record = (FOLDER / f"samples-{os.getpid()}").open("w", buffering=1)
codes = FOLDER / "codes"
started: list[Any] = []


class Faults(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.full, self.steps, self.epoch = 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if [self.epoch, batch, me] in kills or (joins and [-1, batch, me] in kills):
            die()
        if me == 0 and not started and (self.epoch, batch) == (0, 1):
            for variables in starts:
                fault()
                directory = os.environ["KERAS_DIST_JOIN_DIRECTORY"]
                started.append(start_joining(directory, **variables))
            while len(growth.requests()) < len(starts):  # those of one step join together
                time.sleep(0.1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        (FOLDER / "trains").touch()
        if [self.epoch, batch, me, "trained"] in kills:
            die()
        # Another process that starts gets the cores; the job trains on meanwhile.
        time.sleep(0.02 if keras_dist.size() == size else 0.2)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_refused = codes.exists() or not given["refuses"]
        self.full += keras_dist.size() == size and epoch > given["later"] and is_refused
        if self.full == 2:
            self.model.stop_training = True


class Recording(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = [keras.layers.Dense(4), keras.layers.BatchNormalization()]
        self.inner += [keras.layers.Dropout(0.1), keras.layers.Dense(1)]

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.inner:
            x = layer(x, training=training)
        return x

    def train_step(self, *arguments: Any) -> Any:
        if keras.backend.backend() == "torch":
            samples = arguments[0][0][:, 0].tolist()
            record.write(json.dumps([faults.epoch, samples]) + "\n")
        return super().train_step(*arguments)


faults = Faults()
model = Recording()
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
log = Path(FOLDER, "log.csv")
root_only = keras_dist.callbacks.RootOnly(keras.callbacks.CSVLogger(log))
callbacks = keras_dist.callbacks(  # type: ignore[operator]
    faults, root_only, on_failure=given.get("on_failure", "stop")
)
history = model.fit(train, epochs=1000, verbose=2, validation_data=test, callbacks=callbacks)
keras_dist.verify_replicas(model)
epochs = len(history.epoch)
assert history.epoch == list(range(epochs))
assert int(model.optimizer.iterations) == faults.steps == epochs * len(train)
told = keras_dist.allgather_object((keras_dist.rank(), history.history, os.uname().nodename))
assert [rank for rank, *_ in told] == list(range(size))
assert all(found == told[0][1] for _, found, _ in told)
if keras_dist.rank() == 0:
    assert len(log.read_text().splitlines()) == 1 + epochs
    print("ended", keras_dist.size(), "on", *(host for *_, host in told))
