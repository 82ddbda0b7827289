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
from faults import fault, send, start_joining
from sklearn.datasets import load_digits

import keras_dist
from keras_dist.runtime import growth

plan = json.loads(pathlib.Path(sys.argv[1]).read_text())
keras_dist.init()
me = "joined" if growth.is_waiting() else keras_dist.rank()
takes_ranks = plan["mode"] in ("replace", "join")
complete = plan["ranks"] + len(plan.get("joins", ()))
keras.utils.set_random_seed(7)
ours: Any = keras_dist.callbacks


def strike(kind: str) -> None:
    """Causes the fault of this rank."""
    fault()
    if kind.startswith("kill"):
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
        self.updates += not self.kind.endswith("when complete") or keras_dist.size() == complete
        mark = folder / f"done-{me}"
        if self.updates != self.update or mark.exists():  # once, also after a restart
            return
        mark.touch()
        if self.kind.startswith(("kill", "stop")):
            threading.Timer(self.milliseconds / 1000, strike, [self.kind]).start()
        else:
            strike(self.kind)


class Growth(keras.callbacks.Callback):
    """Starts the processes that join, and ends training two epochs after there are all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.updates, self.full = 0, 0
        self.has_lost = plan["mode"] == "join" or me == "joined"

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.updates += 1
        if me == 0:
            for _ in range(plan["joins"].count(self.updates)):
                start_joining(folder / "job")
        self.has_lost |= keras_dist.size() < complete
        # Another process that starts gets the cores; the job trains on meanwhile.
        time.sleep(0.02 if keras_dist.size() == complete and self.has_lost else 0.2)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.full += keras_dist.size() == complete and self.has_lost
        self.model.stop_training = self.full == 3

    def state_dict(self) -> dict[str, Any]:
        return {"full": self.full, "has_lost": self.has_lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.full, self.has_lost = state["full"], state["has_lost"]


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
first = Growth() if takes_ranks else ours.BackupAndRestore(folder / "backup")
options = {"on_failure": plan["mode"]} if plan["mode"] in ("continue", "replace") else {}
if not plan["uneven"]:
    callbacks = ours(first, **options)
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
