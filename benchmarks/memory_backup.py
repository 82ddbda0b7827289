"""Times how a restart reads a backup from the memory of another host, compared with one from disk.

    python benchmarks/memory_backup.py [--backend tensorflow|jax|torch] [--mb 100] [--quick]

The hosts are two network namespaces of this machine with one rank each, see scripts/hosts: root is
needed. A fit writes a backup and ends. Before the next fit, the host of the root loses its memory:
the backup comes from the other host. The peer is a fit that finds the same backup on the disk of
the root, in the page cache. A time is that of the slowest rank, from the search for the backup
until all ranks have the state.
"""

import functools
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from common import MIB, answer, conclude, load, options_of, parser, slug, surroundings, table
from host_jobs import Unavailable, start_on_hosts
from ranks import barrier, everyones

CONTENDERS = {"memory": "memory of the other host", "disk": "disk of the root"}
BOUND = 1.0
WIDTH = 1024
COPIES = 3  # the weights, and two moments of Adam


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="torch")
    made.add_argument("--mb", type=int, default=100, help="megabytes of weights and moments")
    made.add_argument("--directory", help="where the backup on disk goes; TMPDIR by default")
    options = options_of(made, work)
    before = load()
    directory = tempfile.mkdtemp(dir=options.directory)
    rounds = 1 if options.quick else 5
    task = {"rounds": rounds, "mb": options.mb, "directory": directory}
    environment = {"KERAS_BACKEND": options.backend, "KERAS_DIST_JOB_ID": directory}
    try:
        found = start_on_hosts(__file__, 2, 1, task, environment=environment)
    except Unavailable as error:
        made.error(f"no test hosts: {error}")
    finally:
        shutil.rmtree(directory)
    report(options, before, found)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras
    import numpy as np

    import keras_dist
    from keras_dist import config
    from keras_dist.storage import memory_directory

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    directory = Path(task["directory"], "backup")
    inputs = max(1, task["mb"] * 10**6 // (4 * WIDTH * COPIES))
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(WIDTH)])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    x = np.full((2, inputs), 1 + keras_dist.rank(), np.float32)
    y = np.ones((2, WIDTH), np.float32)
    written, found = ({name: [] for name in CONTENDERS} for _ in range(2))

    def fit(restores, name):
        timed = make_timed(directory, restores, memory=name == "memory")
        try:
            model.fit(x, y, 1, epochs=2, verbose=0, callbacks=keras_dist.callbacks(timed))
        except StopIteration:
            kind = found if restores else written
            kind[name].append(slowest(timed.seconds))
        barrier()

    def lose():
        if keras_dist.rank() == 0:
            memory_directory.remove_job(config.settings())
            shutil.rmtree(directory)
        barrier()

    for name in [*CONTENDERS] * (1 + task["rounds"]):
        fit(False, name)
        weights = [value.copy() for value in model.get_weights()]
        model.set_weights([np.zeros_like(value) for value in weights])
        if name == "memory":
            lose()
        fit(True, name)
        assert all(map(np.array_equal, model.get_weights(), weights)), "another state came back"
        memory_directory.remove_job(config.settings())
        barrier()
        if keras_dist.rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        barrier()
    if keras_dist.rank() == 0:
        nbytes = COPIES * sum(value.nbytes for value in weights)
        answer(path, {"written": written, "found": found, "nbytes": nbytes})


def slowest(seconds):
    return max(row[0] for row in everyones([seconds]))


def make_timed(directory, restores, memory):
    """Returns a backup that ends the fit when it has been written, or restored."""
    from keras_dist.callbacks import BackupAndRestore

    class Timed(BackupAndRestore):
        seconds = 0.0

        def timed(self, call):
            barrier()
            began = time.perf_counter()
            call()
            self.seconds += time.perf_counter() - began

        def enter(self, session):
            self.timed(functools.partial(super().enter, session))

        def on_train_begin(self, logs=None):
            self.timed(functools.partial(super().on_train_begin, logs))
            if restores:
                raise StopIteration
            self.seconds = 0.0

        def _back_up(self):
            self.timed(super()._back_up)
            raise StopIteration

    return Timed(directory, memory=memory)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    size = f"{found['nbytes'] / MIB:.0f} MiB of weights and optimizer state"
    text = [f"# Backup in memory, {options.backend}, {size}, two hosts", surroundings(before)]
    body = []
    for name, title in CONTENDERS.items():
        kinds = found["found"][name][1:], found["written"][name][1:]  # the first warms up
        body.append([title, *(f"{1e3 * statistics.median(kind):.0f}" for kind in kinds)])
    body[0][0] += ", and disk"
    text.append(table(["backup in", "ms until all ranks have it", "ms to write it"], body))
    worst = max(found["found"]["memory"][1:])
    rows = [
        (
            f"{options.mb} MB come from the memory of the other host, the slowest round",
            f"<= {BOUND:.1f} s",
            f"{worst:.2f} s",
            worst <= BOUND,
        )
    ]
    conclude(options.output, slug(f"memory_backup_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
