"""The ranks of tests/faults/soak.py: a long fit.

soak_training.py FOLDER EPOCHS STEPS MILLISECONDS [backup]

Each rank notes each step with a digest of weights and optimizer, and waits some milliseconds.
"""

import hashlib
import os
import pathlib
import sys
import time
from typing import Any

import keras
import numpy as np
from fits import build, fit, rank

import keras_dist

folder, epochs, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
pause = float(sys.argv[4]) / 1000
count = steps * 8 * keras_dist.size()


class Steps(keras.callbacks.Callback):
    """Notes the steps, raises if told to, and ends training with an epoch if told to."""

    def on_train_begin(self, logs: Any = None) -> None:
        (folder / f"rank-{rank}").write_text(str(os.getpid()))
        self.notes = os.open(folder / f"steps-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        mark = folder / f"raise-{rank}"
        if mark.exists():
            mark.unlink()
            raise ValueError("soak")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not logs:  # a batch that a resumed fit skips
            return
        optimizer = self.model.optimizer
        found = [*self.model.weights, *optimizer.variables]  # not the seeds, which are each rank's
        bits = [keras.ops.convert_to_numpy(each).tobytes() for each in found]
        digest = hashlib.blake2b(b"".join(bits), digest_size=8).hexdigest()
        # In one call: this process may be killed at any time.
        os.write(self.notes, f"{int(optimizer.iterations)} {digest}\n".encode())
        time.sleep(pause)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if keras_dist.broadcast_object((folder / "enough").exists()):
            self.model.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


rng = np.random.default_rng(0)
x = rng.standard_normal((count, 6)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True)) + rng.standard_normal((count, 1)).astype("float32")
data = keras_dist.data.shard((x, y), batch_size=8, seed=1)
ours: Any = keras_dist.callbacks
made = [ours.BackupAndRestore(folder / "backup", save_freq=1, memory=True)]
saved = made if sys.argv[5:] else []
fit(*saved, data=data, model=build((128, 128), 0.2), behind=[Steps()], epochs=epochs)
