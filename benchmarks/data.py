"""Times how ranks come to their data: HDF5 beside plain reading, readers, shards of tf.data.

    python benchmarks/data.py [--ranks 2] [--quick] [--folder /tmp]

It makes a file of 2 GB (0.2 with --quick) in the folder, reads it from the page cache and removes
it. All contenders of a table take turns in one job, so that what else the machine does falls on all
of them alike. A ratio is the median of the ratios round by round.
"""

import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from common import (
    MIB,
    answer,
    conclude,
    load,
    options_of,
    parser,
    ratio,
    slug,
    start,
    surroundings,
    table,
)
from turns import in_turn

GRID, BATCH = 1024, 256  # a row has 4 KiB, a batch 1 MiB
READ_AT_ONCE = 16 * MIB
WAYS = {
    "dd": "the system, into one buffer",
    "batches": "hdf5, in order",
    "shuffled": "hdf5, shuffled",
    "mpi": "hdf5, mpi_io='independent'",
    "readers": "hdf5, readers=1",
}
OPTIONS = {
    "batches": {"shuffle": False},
    "shuffled": {},
    "mpi": {"shuffle": False, "mpi_io": "independent"},
    "readers": {"readers": 1},
}
ELEMENTS = 20_000
BLOCK_ROWS = 256  # of 1 MiB, where memory is measured


def main():
    made = parser(__doc__, quick="a smaller file, fewer rounds")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--folder", type=Path, help="where the file is made")
    options = options_of(made, work)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    before, rounds = load(), 3 if options.quick else 5
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        nbytes = 200_000_000 if options.quick else 2_000_000_000
        sizes = {"small.h5": nbytes // 10, "large.h5": nbytes}
        for name, size in sizes.items():
            make_file(Path(folder) / name, size)

        def job(ranks, task, **more):
            print(task, "...", flush=True)
            return start(
                __file__, ranks, {"task": task, "folder": folder, "rounds": rounds, **more}
            )

        found = {
            "alone": job(0, "reading"),
            "all": job(options.ranks, "reading"),
            "training": job(options.ranks, "training"),
            "tf.data": job(options.ranks, "elements"),
        }
        for way in ("shuffled", "readers"):
            found[way] = {
                name: job(options.ranks, "memory", file=name, way=way)["peak"] for name in sizes
            }
    report(options, before, nbytes, found)


def make_file(path, nbytes):
    import h5py

    rows = nbytes // (4 * GRID)
    with h5py.File(path, "w") as file:
        inputs = file.create_dataset("x", (rows, GRID), "f4")
        targets = file.create_dataset("y", (rows, 1), "f4")
        random = np.random.default_rng(0)
        for first in range(0, rows, 4096):
            count = min(4096, rows - first)
            inputs[first : first + count] = random.random((count, GRID), "f4")
            targets[first : first + count] = random.random((count, 1), "f4")


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    found = {
        "reading": time_reading,
        "training": time_training,
        "elements": time_elements,
        "memory": measure_memory,
    }[task["task"]](task)
    if keras_dist.rank() == 0:
        answer(path, found)


def batches_of(path, **options):
    """Returns batches as numpy arrays, before they become anything of a framework's."""
    from keras_dist.data import row_source

    for_keras, row_source.for_keras = row_source.for_keras, lambda batches, ahead: batches
    try:
        return hdf5(path, **options)
    finally:
        row_source.for_keras = for_keras


def hdf5(path, **options):
    import keras_dist

    return keras_dist.data.hdf5(path, "x", "y", BATCH, **options)


def together(measure):
    """Returns the seconds that something takes on all ranks."""
    import keras_dist

    keras_dist.barrier()
    begin = time.perf_counter()
    measure()
    keras_dist.barrier()
    return time.perf_counter() - begin


def time_reading(task):
    """Returns MB/s of all ranks together, by contender."""
    import keras_dist

    path = Path(task["folder"]) / "large.h5"
    nbytes = path.stat().st_size
    rank, size = keras_dist.rank(), keras_dist.size()
    made = {name: batches_of(path, **way) for name, way in OPTIONS.items()}
    buffer = bytearray(READ_AT_ONCE)

    def read(name):
        if name == "dd":
            with open(path, "rb", buffering=0) as file:
                file.seek(nbytes * rank // size)
                left = nbytes // size
                while left > 0:
                    left -= file.readinto(buffer) or left
            return
        data = made[name]
        epoch = data.epochs.advance()
        for step in range(data.plan.steps):
            data.batch(epoch, step)

    read("dd")  # into the page cache
    return in_turn(WAYS, task["rounds"], lambda name: nbytes / 1e6 / together(lambda: read(name)))


def time_training(task):
    """Returns rows/s of all ranks together in fit, by contender."""
    import keras

    import keras_dist

    path = Path(task["folder"]) / "large.h5"
    # Enough to be a training, little enough that reading would show.
    model = keras.Sequential(
        [
            keras.Input((GRID,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(1e-3)), "mse")
    # A few blocks for each rank; the file is long enough for as many with --quick.
    steps = min(160, path.stat().st_size // (4 * GRID * BATCH * keras_dist.size()))
    made = {
        name: hdf5(path, steps=steps, **OPTIONS[name]) for name in ("shuffled", "readers", "mpi")
    }

    def rate(name):
        data = made[name]
        seconds = together(lambda: model.fit(data, verbose=0))
        return len(data) * BATCH * keras_dist.size() / seconds

    for name in made:
        rate(name)
    return in_turn(made, task["rounds"], rate)


def time_elements(task):
    """Returns microseconds for an element of a tf.data pipeline, sharded and not."""
    import tensorflow as tf

    import keras_dist

    def pipeline():
        # As from a reader: what comes behind cannot be fused with it.
        numbers = tf.data.Dataset.range(ELEMENTS)
        rows = numbers.map(lambda i: tf.math.sin(tf.fill((GRID,), tf.cast(i, tf.float32))))
        return rows.prefetch(tf.data.AUTOTUNE)

    # Every rank reads the whole pipeline either way.
    plain = pipeline().batch(BATCH).prefetch(tf.data.AUTOTUNE)
    made = {
        "plain": plain,
        "sharded": keras_dist.data.shard(pipeline(), BATCH, shuffle=False),
    }

    def cost(name):
        def run():
            for _ in made[name]:
                pass

        return together(run) / ELEMENTS * 1e6

    for name in made:
        cost(name)
    return in_turn(made, 3 * task["rounds"], cost)


def measure_memory(task):
    """Returns by how many bytes an epoch raises the peak of this rank's memory."""
    import keras_dist

    data = batches_of(Path(task["folder"]) / task["file"], block=BLOCK_ROWS, **OPTIONS[task["way"]])
    before = peak()
    for step in range(data.plan.steps):
        data.batch(0, step)
    keras_dist.barrier()
    return {"peak": float(keras_dist.allreduce(peak() - before, op="max"))}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# --- what came out ---------------------------------------------------------------------------


def report(options, before, nbytes, found):
    ranks = f"{options.ranks} ranks"
    text = [f"# Data, a file of {nbytes / 1e9:g} GB in the page cache, rows of 4 KiB"]
    text.append(surroundings(before))
    text.append("## Reading alone: MB/s in total, and the ratio to the system\n")
    body = [
        [
            label,
            *(
                f"{middle(found[n][way]):.0f} ({ratio(found[n][way], found[n]['dd']):.2f})"
                for n in ("alone", "all")
            ),
        ]
        for way, label in WAYS.items()
    ]
    text.append(table(["way", "one process", ranks], body))
    text.append(
        f"\n## In training on {ranks}: rows/s in total, and the ratio to every rank its own\n"
    )
    rates = found["training"]
    body = [
        [WAYS[way], f"{middle(rates[way]):.0f} ({ratio(rates[way], rates['shuffled']):.2f})"]
        for way in rates
    ]
    text.append(table(["way", ranks], body))
    elements = found["tf.data"]
    text.append(
        f"\n## tf.data: {middle(elements['plain']):.2f} us an element, "
        f"sharded {middle(elements['sharded']):.2f} us"
    )
    conclude(options.output, slug("data"), text, judge(found))


def middle(numbers):
    return statistics.median(numbers)


def judge(found):
    alone, rates, elements = found["alone"], found["training"], found["tf.data"]
    rows = []

    def row(what, bound, value, holds, form=".3f"):
        rows.append((what, bound, f"{value:{form}}", holds))

    value = ratio(alone["batches"], alone["dd"])
    row("hdf5, contiguous, to the system", ">= 0.80", value, value >= 0.8)
    value = ratio(rates["readers"], rates["shuffled"])
    row("one reader to every rank its own, in training", ">= 0.85", value, value >= 0.85)
    value = ratio(elements["sharded"], elements["plain"])
    row("an element of tf.data, sharded to not", "<= 1.02", value, value <= 1.02)
    block = 4 * GRID * BLOCK_ROWS / MIB
    for way in ("shuffled", "readers"):
        small, large = (found[way][name] / MIB for name in ("small.h5", "large.h5"))
        what = f"{WAYS[way]}: memory of an epoch, MiB, file 10 times as large"
        bound = small + 4 * block
        row(what, f"<= {bound:.0f}", large, large <= bound, ".0f")
    return rows


if __name__ == "__main__":
    main()
