"""Times sums of the rows of an embedding's gradient, on a rank and over ranks.

    python benchmarks/rows.py [--ranks 2] [--quick]

It starts its own ranks. Each has 64 MiB of float32 rows with 64 numbers. The contenders take turns;
a time is that of the slowest rank. "add.at" is what keras_dist did before: `numpy.add.at` on each
rank, an Allgatherv of the MPI library, and `numpy.add.at` again. The peers are that Allgatherv
alone, which is all that Horovod does with rows, and torch's allreduce of sparse tensors over gloo.
"""

import json
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
from ranks import time_calls

WIDTH = 64
KINDS = {
    "each row on one rank": lambda rng, rank, size, count: rng.permutation(count) * size + rank,
    "all rows on all ranks": lambda rng, rank, size, count: rng.permutation(count),
    "uniform": lambda rng, rank, size, count: rng.integers(0, count, count),
    "Zipf": lambda rng, rank, size, count: np.minimum(rng.zipf(1.1, count), 10**7),
}
ALONE = ["keras_dist", "add.at"]
OVER = ["keras_dist", "add.at", "Allgatherv", "torch, gloo"]


def main():
    made = parser(__doc__, quick="16 MiB, fewer rounds")
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    before = load()
    rounds, nbytes = (2, 16 * MIB) if options.quick else (5, 64 * MIB)
    found = start(__file__, options.ranks, {"rounds": rounds, "nbytes": nbytes})
    report(options, before, found, nbytes)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import torch

    import keras_dist
    from keras_dist._engine.collectives.slices import RowGroups

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    rank, size = keras_dist.rank(), keras_dist.size()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}.store", rank=rank, world_size=size
    )
    torch.set_num_threads(1)
    count = task["nbytes"] // 4 // WIDTH
    values = np.random.default_rng(rank).standard_normal((count, WIDTH)).astype("float32")

    def alone(indices):
        groups = RowGroups(indices)
        sums = np.empty((len(groups), WIDTH), "float32")
        groups.sum_rows(values, sums)
        return sums

    found = {}
    for kind, draw in KINDS.items():
        indices = draw(np.random.default_rng(rank + 7), rank, size, count)
        shape = (size * 10**7, WIDTH)
        sparse = torch.sparse_coo_tensor(indices[np.newaxis], values, shape, check_invariants=False)
        same(keras_dist.sparse_allreduce(values, indices, "sum"), added_at_all(values, indices))
        on_rank = {
            "keras_dist": lambda i=indices: alone(i),
            "add.at": lambda i=indices: added_at(values, i),
        }
        over_ranks = {
            "keras_dist": lambda i=indices: keras_dist.sparse_allreduce(values, i, "sum"),
            "add.at": lambda i=indices: added_at_all(values, i),
            "Allgatherv": lambda i=indices: gathered(values, i),
            "torch, gloo": lambda s=sparse: torch.distributed.all_reduce(s.clone()),
        }
        found[kind] = [time_calls(calls, task["rounds"], 1) for calls in (on_rank, over_ranks)]
    torch.distributed.destroy_process_group()
    if rank == 0:
        answer(path, found)


def added_at(values, indices):
    unique, inverse = np.unique(indices, return_inverse=True)
    total = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(total, inverse, values)
    return total, unique


def added_at_all(values, indices):
    return added_at(*gathered(*added_at(values, indices)))


def gathered(values, indices):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    counts = np.array(world.allgather(len(indices)))
    rows = np.empty((counts.sum(), WIDTH), values.dtype)
    numbers = np.empty(counts.sum(), indices.dtype)
    world.Allgatherv(values, [rows, counts * WIDTH])
    world.Allgatherv(indices, [numbers, counts])
    return rows, numbers


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes(), "the sums have other bits"


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found, nbytes):
    text = [
        f"# Rows of an embedding, {nbytes // MIB} MiB on each of {options.ranks} ranks",
        surroundings(before),
    ]
    rows = []
    titles = ("Added up on a rank", "Added up over ranks")
    for number, (title, contenders) in enumerate(zip(titles, (ALONE, OVER), strict=True)):
        body = []
        for kind in KINDS:
            times = found[kind][number]
            medians = [f"{np.median(times[name]):.1f}" for name in contenders]
            faster = {name: ratio(times[name], times["keras_dist"]) for name in contenders[1:]}
            body.append([kind, *medians, f"{faster['add.at']:.1f} x"])
            bounds = {"add.at": 5.0, "torch, gloo": 1.0}
            rows += [
                (
                    f"{title.lower()}, {kind}, against {name}",
                    f">= {bounds[name]:g} x faster",
                    f"{value:.1f} x",
                    value >= bounds[name],
                )
                for name, value in faster.items()
                if name in bounds
            ]
        head = [f"{title}, ms", *contenders, "keras_dist to add.at"]
        text += [table(head, body), ""]
    conclude(options.output, slug("rows"), text, rows)


if __name__ == "__main__":
    main()
