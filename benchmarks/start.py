"""Times the start of a rank: what keras_dist adds until training begins, and to the first step.

    python benchmarks/start.py [--backends tensorflow jax torch] [--rounds 3]

Jobs of two ranks, each pinned to a core, start in turn: plain Keras with mpi4py, and keras_dist as
in the README. A rank notes the seconds since its process started when all is imported and MPI
initialized, and those of an epoch of one step of `fit`. A number is the median of the slowest
ranks, a difference the median of the differences round by round. The environment must have
bytecode, as after a first run: without it, compiling all modules takes longer than both.
"""

import json
import os
import statistics
import time
from pathlib import Path

from common import (
    answer,
    conclude,
    launcher,
    load,
    options_of,
    parser,
    slug,
    start,
    surroundings,
    table,
)
from models import MODELS
from turns import in_turn

RANKS = 2
BACKENDS = ["tensorflow", "jax", "torch"]
WAYS = {"plain": "Keras and mpi4py", "ours": "keras_dist"}
# Seconds that keras_dist may add.
BOUNDS = {"ready": 0.25, "first": 0.5}
POINTS = {"ready": "until all is imported and initialized", "first": "first step of `fit`"}
MODEL = "mlp"


def main():
    made = parser(__doc__, quick="two rounds")
    made.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    made.add_argument("--rounds", type=int, default=3, help="how often each job is started")
    options = options_of(made, work)
    before, found = load(), {}
    for backend in options.backends:
        measure = Measure(backend)
        for way in WAYS:
            measure(way)
        found[backend] = in_turn(WAYS, 2 if options.quick else options.rounds, measure)
    report(options, before, found)


class Measure:
    """Starts the jobs of a backend."""

    def __init__(self, backend):
        self._backend = backend

    def __call__(self, way):
        """Returns the seconds of a job until each of `POINTS`."""
        bound = [] if "--oversubscribe" in launcher() else ["-bind-to", "core"]
        variables = {"KERAS_BACKEND": self._backend, "OMP_NUM_THREADS": "1"}
        return start(__file__, RANKS, {"way": way}, 300, bound, **variables)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    task = json.loads(Path(path).read_text())
    if task["way"] == "ours":
        import keras

        import keras_dist

        keras_dist.init()
        ready = age()
        wrap, callbacks = keras_dist.DistributedOptimizer, keras_dist.callbacks
    else:
        import keras
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
        ready = age()
        wrap, callbacks = (lambda optimizer: optimizer), list
    model = MODELS[MODEL]
    inputs, labels = model.data(model.batch_size, 0)
    made = model.compiled(wrap(keras.optimizers.SGD(0.01)))
    ends = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: first.append(time.perf_counter()))
    first = []
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()  # a rank that has started sooner waits in the first step
    begin = time.perf_counter()
    options = {"batch_size": model.batch_size, "verbose": 0}
    made.fit(inputs, labels, callbacks=[*callbacks(), ends], **options)
    seconds = ready, first[0] - begin
    slowest = [MPI.COMM_WORLD.allreduce(one, MPI.MAX) for one in seconds]
    if MPI.COMM_WORLD.Get_rank() == 0:
        answer(path, dict(zip(POINTS, slowest, strict=True)))


def age():
    """Returns the seconds since this process started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    body, rows = [], []
    for backend, ways in found.items():
        for point, words in POINTS.items():
            seconds = {name: [one[point] for one in runs] for name, runs in ways.items()}
            pairs = zip(seconds["ours"], seconds["plain"], strict=True)
            more = statistics.median(ours - plain for ours, plain in pairs)
            middles = [f"{statistics.median(seconds[name]):.2f}" for name in WAYS]
            body.append([f"{backend}: {words}", *middles, f"{more:+.2f}"])
            bound = BOUNDS[point]
            rows.append((f"{backend}: {words}", f"<= +{bound} s", f"{more:+.2f} s", more <= bound))
    text = [f"# The start of {RANKS} ranks", surroundings(before), "Medians, in seconds.\n"]
    text.append(table(["", *WAYS.values(), "more"], body))
    conclude(options.output, slug("start"), text, rows)


if __name__ == "__main__":
    main()
