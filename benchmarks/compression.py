"""Times steps of Keras fit on two hosts with slow links, for each compression of gradients.

    python benchmarks/compression.py [--gbit 1 2.5 10] [--models mlp transformer] [--backend torch]

The hosts are network namespaces of this machine, see scripts/hosts: root is needed. Each rank
computes with one thread. The compressions train in turn within one job, a short fit each, and their
first steps are left out.
"""

import json
import statistics
import time
from pathlib import Path

from common import answer, conclude, load, options_of, parser, slug, surroundings, table
from host_jobs import Unavailable, start_on_hosts
from models import MODELS

# By contender: its title, and the compression; `None` does not communicate.
CONTENDERS = {
    "alone": ("no communication", None),
    "none": ("`none`", "none"),
    "bf16": ("`bf16`", "bf16"),
    "powersgd": ("`powersgd(4)`", "powersgd(rank=4)"),
    "topk": ("`topk(0.01)`", "topk(ratio=0.01)"),
}


def main():
    made = parser(__doc__)
    made.add_argument("--backend", default="torch")
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "transformer"])
    made.add_argument("--gbit", type=float, nargs="+", default=[1, 2.5], help="Gbit/s of each link")
    options = options_of(made, work)
    before, rounds = load(), 1 if options.quick else 3
    head, body = ["step in ms", "link", *(title for title, _ in CONTENDERS.values())], []
    for model in options.models:
        for gbit in options.gbit:
            task = {"model": model, "rounds": rounds, "steps": 8}
            environment = {"KERAS_BACKEND": options.backend, "KERAS_DIST_THREADS": "1"}
            try:
                found = start_on_hosts(__file__, 2, 1, task, gbit, environment)
            except Unavailable as error:
                made.error(f"no test hosts: {error}")
            alone = statistics.median(found["alone"])
            times = {name: statistics.median(found[name]) for name in CONTENDERS}
            cells = [f"{1e3 * t:.0f} ({alone / t:.2f})" for t in times.values()]
            body.append([MODELS[model].title, f"{gbit:g} Gbit/s", *cells])
            print(*body[-1], flush=True)
    text = ["# Compression of gradients on two hosts, one rank on each", surroundings(before)]
    text.append("In parentheses: the share of the speed without communication.\n")
    conclude(options.output, slug("compression"), [*text, table(head, body)], [])


def work(path):
    import keras

    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    kind, steps = MODELS[task["model"]], task["steps"]
    x, y = kind.data(steps * kind.batch_size, keras_dist.rank())

    class Clock(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.at = []

        def on_train_batch_end(self, batch, logs=None):
            self.at.append(time.perf_counter())

    models = {}
    for name, (_, compression) in CONTENDERS.items():
        optimizer = keras.optimizers.SGD(0.01)
        if compression is not None:
            optimizer = keras_dist.DistributedOptimizer(optimizer, compression=compression)
        models[name] = kind.compiled(optimizer)
    found = {name: [] for name in models}
    for _ in range(task["rounds"]):
        for name, model in models.items():
            clock = Clock()
            keras_dist.barrier()
            model.fit(x, y, batch_size=kind.batch_size, verbose=0, callbacks=[clock])
            half = steps // 2
            found[name].append((clock.at[-1] - clock.at[half - 1]) / (steps - half))
    if keras_dist.rank() == 0:
        answer(path, found)


if __name__ == "__main__":
    main()
