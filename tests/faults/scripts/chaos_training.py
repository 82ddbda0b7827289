"""The ranks of tests/faults/chaos.py: training on digits, with a fault. chaos_training.py PLAN"""

import hashlib
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from faults import FOLDER as folder
from faults import fault, send
from sklearn.datasets import load_digits

import keras_dist

plan = json.loads(pathlib.Path(sys.argv[1]).read_text())
keras_dist.init()
me = keras_dist.rank()
keras.utils.set_random_seed(7)
ours: Any = keras_dist.callbacks


def strike(kind: str) -> None:
    """Causes the fault of this rank."""
    fault()
    if kind == "kill":
        send("SIGKILL")
    elif kind == "stop":
        send("SIGSTOP")
    elif kind == "raise":
        raise ValueError("chaos")
    elif kind == "delay":
        time.sleep(1.5)


class Fault(keras.callbacks.Callback):
    """Waits for the chosen update; a kill or stop happens some milliseconds later."""

    def __init__(self, kind: str, update: int, milliseconds: int) -> None:
        super().__init__()
        self.kind, self.update, self.milliseconds = kind, update, milliseconds
        self.updates = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.updates += 1
        mark = folder / f"done-{me}"
        if self.updates != self.update or mark.exists():  # once, also after a restart
            return
        mark.touch()
        if self.kind in ("kill", "stop"):
            threading.Timer(self.milliseconds / 1000, strike, [self.kind]).start()
        else:
            strike(self.kind)


digits = load_digits()
x, y = digits.data[:480].astype("float32") / 16, digits.target[:480]
if plan["uneven"]:
    own = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 80 + 20 * plan["uneven"][me], 20)]
    data = [own] * plan["epochs"]
else:
    shared = keras_dist.data.shard((x, y), batch_size=20, seed=1)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(32, "relu"),
        keras.layers.Dropout(0.2, seed=3),
        keras.layers.Dense(10, "softmax"),
    ]
)
model.compile(
    keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.01)), "sparse_categorical_crossentropy"
)
# The last callback, because the ranks then need not agree on stopping at every batch.
mine = [Fault(*fault) for rank, *fault in plan["faults"] if rank == me]
options = {"on_failure": "continue"} if plan["mode"] == "continue" else {}
if not plan["uneven"]:
    callbacks = ours(ours.BackupAndRestore(folder / "backup"), **options)
    model.fit(shared, epochs=plan["epochs"], verbose=0, callbacks=callbacks + mine)
else:
    for batches in data:

        def generate(batches: Any = batches) -> Iterator[Any]:
            yield from batches

        callbacks = ours(**options)
        model.fit(generate(), verbose=0, callbacks=callbacks + mine)
keras_dist.verify_replicas(model)
digest = hashlib.blake2b(b"".join(np.asarray(w).tobytes() for w in model.get_weights()))
told = keras_dist.allgather_object((digest.hexdigest(), me))
if keras_dist.rank() == 0:
    assert len({weights for weights, _ in told}) == 1
    assert all(np.isfinite(w).all() for w in model.get_weights())
    end = {"weights": told[0][0], "ranks": [rank for _, rank in told]}
    (folder / "end.json").write_text(json.dumps(end))
