"""Times how ranks come to a running fit: in the place of one that died, or besides the others.

    python benchmarks/joining.py [--backend tensorflow|jax|torch] [--rounds 3] [--quick]

With Open MPI, one of three ranks is killed, and `on_failure="replace"` starts another. With MPICH,
a process joins two ranks by `keras-dist join`. Each round is a job. A time ends when all three
ranks have ended their first step together; the compilation of that step is in it.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import answer, conclude, load, mpi, options_of, parser, slug, start, surroundings, table

SIZE = 3
STEP = 40  # of the kill, or of the start of another process
MORE = 40  # steps with all ranks before the job ends
BOUNDS = {"replace": 10.0, "join": 2.0}
WHAT = {
    "replace": "three ranks again, from the kill of one",
    "join": "three ranks instead of two, from the end of the imports of the third",
}


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    made.add_argument("--rounds", type=int, default=3, help="number of jobs")
    options = options_of(made, work)
    before = load()
    way = "replace" if mpi() == "Open MPI" else "join"
    rounds = 1 if options.quick else options.rounds
    found = [measure(way, options.backend) for _ in range(rounds)]
    report(options, before, way, found)


def measure(way, backend):
    with tempfile.TemporaryDirectory() as directory:
        task = {"way": way, "directory": directory}
        variables = {"KERAS_BACKEND": backend}
        if way == "join":
            variables["KERAS_DIST_JOIN_DIRECTORY"] = directory
        more = {"options": ["--with-ft", "ulfm"]} if way == "replace" else {}
        ranks = SIZE if way == "replace" else SIZE - 1
        return start(__file__, ranks, task, 300, **more, **variables)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras
    import numpy as np

    import keras_dist
    from keras_dist.runtime import growth

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    imported = time.time()
    joins = growth.is_waiting()
    x = np.random.default_rng(0).normal(size=(6144, 64)).astype(np.float32)
    y = np.arange(len(x)) % 10
    layers = [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), loss)
    steps = make_steps(path, task, joins)
    reaction = {"on_failure": "replace"} if task["way"] == "replace" else {}
    data = keras_dist.data.shard((x, y), batch_size=32)
    model.fit(data, epochs=1000, verbose=0, callbacks=keras_dist.callbacks(steps, **reaction))
    keras_dist.verify_replicas(model)
    mine = {"joins": joins, "imported": imported, "steps": steps.ends}
    everyone = keras_dist.allgather_object(mine)
    if keras_dist.rank() == 0:
        answer(path, times(task, everyone))


def times(task, everyone):
    """Returns the times of a job, in seconds."""
    [joined] = [one for one in everyone if one["joins"]]
    complete = max(first(one["steps"]) for one in everyone)
    if task["way"] == "replace":
        began = float(Path(task["directory"], "killed").read_text())
    else:
        began = joined["imported"]
    ends = [end for end, _ in everyone[0]["steps"]]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "complete": complete - began,
        "imported": joined["imported"] - began,
        "longest": max(steps),
        "usual": statistics.median(steps),
    }


def first(steps):
    """Returns the end of the first step of all ranks after there were fewer."""
    fewer = [at for at, (_, size) in enumerate(steps) if size < SIZE]
    return steps[fewer[-1] + 1 if fewer else 0][0]


def make_steps(path, task, joins):
    import keras

    import keras_dist

    class Steps(keras.callbacks.Callback):
        """Records the end of each step, and strikes once."""

        def __init__(self):
            super().__init__()
            self.ends, self.has_struck, self.more = [], joins, 0
            self.me = keras_dist.rank()

        def on_train_batch_begin(self, batch, logs=None):
            if self.has_struck or len(self.ends) < STEP:
                return
            self.has_struck = True
            if task["way"] == "join" and self.me == 0:
                start_another(path, task["directory"])
            if task["way"] == "replace" and self.me == 1:
                Path(task["directory"], "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch, logs=None):
            self.ends.append((time.time(), keras_dist.size()))
            sizes = {size for _, size in self.ends}
            if self.ends[-1][1] == SIZE and (joins or len(sizes) > 1):
                self.more += 1
                self.model.stop_training = self.more == MORE

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    return Steps()


def start_another(path, directory):
    """Starts a process that joins, without the variables of this rank's MPI."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PMI", "MPI_", "HYDRA", "MPIR_"))
    }
    command = [sys.executable, "-m", "keras_dist.launch.cli", "join", directory]
    command += [sys.executable, __file__, "--worker", path]
    subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, way, found):
    text = [f"# Ranks come to a running fit, {options.backend}", surroundings(before)]
    head = ["job", "s until all take a step together", "imports of the new rank, s"]
    head += ["longest step, s", "median step, s"]
    body = []
    for number, one in enumerate(found, 1):
        imports = f"{one['imported']:.1f}" if way == "replace" else "before"
        rest = [f"{one[name]:.3f}" for name in ("longest", "usual")]
        body.append([str(number), f"{one['complete']:.2f}", imports, *rest])
    text.append(table(head, body))
    worst, bound = max(one["complete"] for one in found), BOUNDS[way]
    rows = [(f"{WHAT[way]}, the slowest", f"<= {bound:.0f} s", f"{worst:.2f} s", worst <= bound)]
    conclude(options.output, slug(f"joining_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
