"""Times how long a sharded checkpoint holds up Keras fit, to that of a synchronous one.

    python benchmarks/checkpoint.py [--backend tensorflow|jax|torch] [--mb 1000] [--quick]

It starts its own ranks, which train a wide layer with Adam and sharded state, a few steps each
time: without a checkpoint, with one that is written behind training, with one for which training
waits, and with a backup that the root writes. The time of the hook is how long a step is held up;
the fit, to its end, adds what the writing thread takes from the cores. A ratio is the median of the
ratios round by round.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from common import MIB, answer, conclude, load, options_of, parser, ratio, slug, start, surroundings
from common import table as table_of
from ranks import barrier, everyones
from turns import in_turn

CONTENDERS = {
    "none": "no checkpoint",
    "behind": "ShardedCheckpoint",
    "waits": "ShardedCheckpoint(asynchronous=False)",
    "root": "BackupAndRestore",
}
BOUND = 0.05
WIDTH = 4096
MOMENTS = 2  # of Adam, for each weight


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--mb", type=int, default=1000, help="megabytes of weights and moments")
    made.add_argument("--directory", help="where the checkpoints go; TMPDIR by default")
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = options.backend
    rounds, steps = (1, 8) if options.quick else (2, 12)
    before = load()
    directory = tempfile.mkdtemp(dir=options.directory)
    task = {"rounds": rounds, "steps": steps, "mb": options.mb, "directory": directory}
    try:
        found = start(__file__, options.ranks, task)
    finally:
        shutil.rmtree(directory)
    report(options, before, found)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import numpy as np

    import keras_dist

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    steps, inputs = task["steps"], task["mb"] * 10**6 // (4 * WIDTH * (1 + MOMENTS))
    layers = [keras.Input((inputs,)), keras.layers.Dense(WIDTH), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    adam = keras.optimizers.Adam(1e-4)
    model.compile(keras_dist.DistributedOptimizer(adam, shard_state=True), "mse")
    x = np.random.default_rng(keras_dist.rank()).standard_normal((steps, inputs), np.float32)
    held = {name: [] for name in CONTENDERS}

    def seconds(name):
        directory = Path(task["directory"], name)
        timed = make_timed(steps // 4)
        callbacks = [timed] if name == "none" else [make(directory, name, timed), timed]
        barrier()
        model.fit(x, x[:, :1], 1, verbose=0, shuffle=False, callbacks=callbacks)
        held[name].append(timed.slowest("held"))
        barrier()
        if keras_dist.rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        barrier()
        return timed.slowest("fit")

    for name in CONTENDERS:
        seconds(name)
    first = {name: values.pop() for name, values in held.items()}
    found = in_turn(CONTENDERS, task["rounds"], seconds)
    nbytes = model_nbytes(model)
    if keras_dist.rank() == 0:
        answer(path, {"fit": found, "held": held, "first": first, "nbytes": nbytes})


def make_timed(at):
    """Returns a callback that notes the seconds of the steps of a fit, and of one hook."""
    import keras

    class Timed(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.at, self.held = at, 0.0

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:  # the first step of a fit is slower
                self.began = time.perf_counter()

        def on_train_end(self, logs=None):
            self.ended = time.perf_counter()

        def slowest(self, what):
            mine = self.held if what == "held" else self.ended - self.began
            return max(row[0] for row in everyones([mine]))

    return Timed()


def make(directory, name, timed):
    """Returns a checkpoint that is written after one step and notes how long that took."""
    from keras_dist.callbacks import BackupAndRestore, ShardedCheckpoint

    class Once(BackupAndRestore if name == "root" else ShardedCheckpoint):
        def on_train_batch_end(self, batch, logs=None):
            if batch == timed.at:
                began, self._step = time.perf_counter(), batch + 1
                self._keras_dist_save()
                self.session.after_hook(lambda: self.note(began))

        def note(self, began):
            timed.held = time.perf_counter() - began

        def on_epoch_end(self, epoch, logs=None):
            pass

    if name == "root":
        return Once(directory, delete_checkpoint=False)
    return Once(directory, asynchronous=name == "behind", restore=False)


def model_nbytes(model):
    """Returns the size of weights and whole optimizer state, in bytes."""
    from keras_dist.training.model_state import state
    from keras_dist.training.sharded_state import whole_nbytes

    return sum(whole_nbytes(variable) for variable in state(model))


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    fit, held = found["fit"], found["held"]
    size = f"{found['nbytes'] / MIB:.0f} MiB of weights and optimizer state"
    text = [f"# Sharded checkpoint, {options.backend}, {size}, {options.ranks} ranks"]
    text.append(surroundings(before))
    added = {
        name: [a - b for a, b in zip(fit[name], fit["none"], strict=True)] for name in CONTENDERS
    }
    body = [
        [
            title,
            f"{statistics.median(fit[name]):.2f}",
            f"{statistics.median(added[name]):.2f}",
            f"{1e3 * statistics.median(held[name]):.0f}",
            f"{1e3 * found['first'][name]:.0f}",
        ]
        for name, title in CONTENDERS.items()
    ]
    head = ["", "s of the fit", "s added", "ms held up", "ms held up, first fit"]
    text.append(table_of(head, body))
    pairs = {
        "a step is held up, to a synchronous backup of the root": (held["behind"], held["root"]),
        "a step is held up, to a synchronous write of all ranks": (held["behind"], held["waits"]),
        "a fit takes longer, to a synchronous backup of the root": (added["behind"], held["root"]),
    }
    shares = {title: ratio(*pair) for title, pair in pairs.items()}
    rows = [
        (title, f"<= {BOUND:.2f}", f"{share:.3f}", share <= BOUND)
        for title, share in shares.items()
    ]
    conclude(options.output, slug(f"checkpoint_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
