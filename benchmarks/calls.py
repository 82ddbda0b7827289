"""Times what a script calls: keras_dist.allreduce and its forms for tensors, on two ranks.

    python benchmarks/calls.py [--quick] [--faces numpy torch tensorflow jax]

It starts its own ranks, one job for each face. In a job the calls take turns with the engine and
with the MPI library, all of them sum float32, and a ratio is the median of the ratios round by
round. The library's best is the fastest of: a new array for each result, two warm buffers, in
place.
"""

import json
import os
import statistics
from pathlib import Path

import numpy as np
from common import (
    MIB,
    answer,
    conclude,
    library_calls,
    load,
    medians,
    options_of,
    parser,
    ratio,
    slug,
    start,
    surroundings,
    table,
    title,
)

RANKS = 2
SIZES = [4 * 1024, 64 * 1024, MIB, 16 * MIB, 100 * MIB]
FACES = ["numpy", "torch", "tensorflow", "jax"]
LIBRARY = ["as_it_comes", "two_buffers", "in_place"]
CONTENDERS = {
    "own": "a result of one's own",
    "into": "into an array",
    "engine": "the engine, read in place",
    "as_it_comes": "MPI as it comes",
    "two_buffers": "MPI, two warm buffers",
    "in_place": "MPI, in place",
}
SHAPES = 70  # of 1 MiB
TURNS = {
    "shapes": f"{SHAPES} shapes of 1 MiB in turn",
    "shape": f"one shape of 1 MiB, {SHAPES} times",
    "two": "100 and 96 MiB in turn",
    "larger": "100 MiB twice",
}


def main():
    made = parser(__doc__, quick="fewer rounds")
    made.add_argument("--faces", nargs="+", default=FACES, choices=FACES)
    options = options_of(made, work)
    before = load()
    rounds = (3, 5) if options.quick else (7, 31)
    found = {}
    for face in options.faces:
        os.environ["KERAS_BACKEND"] = "tensorflow" if face == "numpy" else face
        found[face] = start(__file__, RANKS, {"face": face, "sizes": SIZES, "rounds": rounds})
    report(options, before, found)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    from mpi4py import MPI
    from turns import compare

    import keras_dist
    from keras_dist import runtime

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    form = Forms(task["face"])
    comm = runtime.communicator()
    found = {"sizes": {}}
    for nbytes in task["sizes"]:
        found["sizes"][nbytes] = compare(MPI, prepare(MPI, comm, form, nbytes // 4), task["rounds"])
    if task["face"] == "numpy":
        found["turns"] = compare(MPI, turns(), task["rounds"])
    if comm.rank == 0:
        answer(path, found)


class Forms:
    """The calls of a face: of what it takes, and how an array is made of it and back."""

    def __init__(self, face):
        import importlib

        self.face = face
        name = "keras_dist" if face == "numpy" else f"keras_dist.{face}"
        self._module = importlib.import_module(name)

    def value(self, array):
        """Returns what the face reduces, with memory of its own."""
        if self.face == "numpy":
            return array.copy()
        if self.face == "torch":
            import torch

            return torch.from_numpy(array.copy())
        if self.face == "tensorflow":
            import tensorflow as tf

            return tf.constant(array)
        import jax

        return jax.numpy.array(array)

    def own(self, value):
        return self._module.allreduce(value, op=self._module.Sum)

    def into(self, value, out):
        """Returns the sum, written into `out`; `None` if the face has no such form."""
        if self.face == "numpy":
            return self._module.allreduce(value, op=self._module.Sum, out=out)
        if self.face == "torch":
            return self._module.allreduce_(out, op=self._module.Sum)
        return None


def prepare(MPI, comm, form, count):
    """Returns a function for each contender, after checking what it computes."""
    from keras_dist import _engine

    world = MPI.COMM_WORLD
    pattern = np.arange(count, dtype=np.float32) % 251
    expected = pattern * world.size + sum(range(world.size))
    mine = pattern + world.rank
    place, out = mine.copy(), np.zeros_like(mine)
    value, target = form.value(mine), form.value(mine)
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    plan = _engine.BucketOptions(mine.nbytes, lend=True)
    fused = _engine.FusedAllreduce(comm, ["a"], [((count,), mine.dtype)], options, plan)
    last = [None]  # as a script that assigns each result to the same name

    def own():
        last[0] = form.own(value)
        return last[0]

    def into():
        last[0] = None  # as a script that has no other results
        return form.into(value, target)

    calls = {"own": own}
    if form.into(value, target) is not None:
        target = form.value(mine)
        calls["into"] = into
    calls |= {"engine": lambda: fused([mine])[0], **library_calls(MPI, mine, place, out)}
    for name, call in calls.items():
        in_place = name == "in_place" or (name == "into" and form.face == "torch")
        for _ in range(1 if in_place else 3):
            right = np.array_equal(np.asarray(call()), expected)
            if not world.allreduce(right, MPI.LAND):
                raise SystemExit(f"{name} is wrong at {mine.nbytes} bytes")
    place.fill(0)  # or the sums would grow from call to call, to infinity
    if form.face == "torch":
        target.zero_()
    return calls


def turns():
    """Returns calls of many shapes, and of as many bytes in one shape."""
    import keras_dist

    def rounds(arrays):
        last = [None]

        def call():
            for array in arrays:
                last[0] = keras_dist.allreduce(array, "sum")
            last[0] = None

        return call

    count = MIB // 4
    shapes = [np.ones((2, count // 2 - number), np.float32) for number in range(SHAPES)]
    two = [np.ones(nbytes * MIB // 4, np.float32) for nbytes in (100, 96)]
    calls = {
        "shapes": rounds(shapes),
        "shape": rounds([np.ones_like(shapes[0]) for _ in shapes]),
        "two": rounds(two),
        "larger": rounds([two[0], np.ones_like(two[0])]),
    }
    for call in calls.values():
        call()
    return calls


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = [f"# Calls of scripts, {RANKS} ranks", surroundings(before)]
    text.append("Medians, in milliseconds.")
    rows = []
    for face, run in found.items():
        sizes = {int(size): samples for size, samples in run["sizes"].items()}
        contenders = {name: CONTENDERS[name] for name in CONTENDERS if name in sizes[SIZES[0]]}
        text += [f"\n## {face}\n", medians(sizes, contenders)]
        rows += judge(face, sizes)
        if "turns" in run:
            body = [
                [what, f"{1e3 * statistics.median(run['turns'][name]):.1f}"]
                for name, what in TURNS.items()
            ]
            text += ["\n## Shapes in turn\n", table(["calls of keras_dist.allreduce", "ms"], body)]
            for many, one in (("shapes", "shape"), ("two", "larger")):
                value = ratio(run["turns"][many], run["turns"][one])
                what = f"{TURNS[many]}, to {TURNS[one]}"
                rows.append((what, "<= 1.1 x its time", f"{value:.2f} x", value <= 1.1))
    faces = [] if options.faces == FACES else options.faces
    conclude(options.output, slug("_".join(["calls", *faces])), text, rows)


def judge(face, sizes):
    """Returns the rows of what must be reached by a face."""
    rows = []

    def slower(size, ours, other, bound, words):
        value = ratio(sizes[size][ours], sizes[size][other])
        what = f"{face}, {title(size)}, {CONTENDERS[ours]} to {words}"
        rows.append((what, f"<= {bound} x its time", f"{value:.2f} x", value <= bound))

    def faster(size, bound):
        value = ratio(sizes[size][best(size)], sizes[size]["own"])
        what = f"{face}, {title(size)}, {CONTENDERS['own']} against MPI's best"
        rows.append((what, f">= {bound} x faster", f"{value:.2f} x", value >= bound))

    def best(size):
        return min(LIBRARY, key=lambda name: statistics.median(sizes[size][name]))

    slower(4096, "own", best(4096), 2.5, "MPI's best")
    slower(64 * 1024, "own", best(64 * 1024), 1.25, "MPI's best")
    faster(MIB, 1.5)
    faster(16 * MIB, 2)
    faster(100 * MIB, 3)
    for size in (MIB, 16 * MIB, 100 * MIB):
        if "into" in sizes[size]:
            slower(size, "into", "engine", 1.2, CONTENDERS["engine"])
    return rows


if __name__ == "__main__":
    main()
