"""The ranks of tests/faults/resume.py and test_resume.py: a fit that is killed.

resume_training.py FOLDER SAVE_FREQ [EPOCH,BATCH,RANK ...]

Afterwards the folder has the files of all callbacks and the results of the fit.
"""

import functools
import hashlib
import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
from faults import send
from fits import At, rank

import keras_dist

folder = pathlib.Path(sys.argv[1])
save_freq = "epoch" if sys.argv[2] == "epoch" else int(sys.argv[2])
EPOCHS, BATCH = 8, 4
size = keras_dist.size()
keras.utils.set_random_seed(7)
ours: Any = keras_dist.callbacks


def kill_once(mark: pathlib.Path) -> None:
    if not mark.exists():
        mark.touch()
        send("SIGKILL")


kills: dict[Any, Any] = {}
for strike in sys.argv[3:]:
    epoch, batch, on = map(int, strike.split(","))
    if on == rank:
        act = functools.partial(kill_once, folder / f"struck-{strike}")
        kills["batch begin", epoch, batch] = act


class Cycle(keras.callbacks.Callback):
    """A user's learning rate callback, whose rate depends on the previous one."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.95 * float(self.model.optimizer.learning_rate)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        factor = 1.2 if batch % 2 else 1 / 1.2
        self.model.optimizer.learning_rate = factor * float(self.model.optimizer.learning_rate)


class Meter(keras.callbacks.Callback):
    """A user's callback with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.mean: Any = np.zeros(2, "float32")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.mean = 0.9 * self.mean + np.float32(logs["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.mean = state["losses"], state["mean"]


rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH * size * 5, 6)).astype("float32")
y = (x @ rng.standard_normal((6, 3))).argmax(axis=1)
data = keras_dist.data.shard((x, y), batch_size=BATCH)
held_out = keras_dist.data.shard((x[::2], 2 - y[::2]), batch_size=BATCH)
layers = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
# torch draws unseeded dropout from its global generator.
layers.append(keras.layers.Dropout(0.2, seed=3 if keras.backend.backend() == "torch" else None))
model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
meter = Meter()
plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1)
early = keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True)
best = ours.ModelCheckpoint(
    folder / "best.weights.h5", "val_accuracy", save_best_only=True, save_weights_only=True
)
every = ours.ModelCheckpoint(
    folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=7
)
log = ours.RootOnly(keras.callbacks.CSVLogger(folder / "log.csv"))
warmup = ours.LearningRateWarmupCallback(0.1 * size, warmup_epochs=2)
backup = ours.BackupAndRestore(folder / "backup", save_freq=save_freq)
# The backup comes first, and must include what later callbacks do in the same hook.
others = [backup, warmup, Cycle(), plateau, early, best, every, log, meter]
callbacks = [*ours(*others), At(kills)]
history = model.fit(data, epochs=EPOCHS, verbose=0, validation_data=held_out, callbacks=callbacks)
keras_dist.verify_replicas(model)
variables = [*model.variables, *optimizer.variables]
bits = [keras.ops.convert_to_numpy(variable).tobytes() for variable in variables]
mine = {
    "weights": hashlib.blake2b(b"".join(bits)).hexdigest(),
    "history": [history.epoch, history.history, history.history == model.history.history],
    "meter": [meter.losses, meter.mean.tolist()],
    "early stopping": [early.best, early.best_epoch, early.stopped_epoch, early.wait],
}
told = keras_dist.allgather_object(mine)
if rank == 0:
    (folder / "end.json").write_text(json.dumps(told))
