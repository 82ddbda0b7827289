"""Times Keras fit on the ranks of one node: keras_dist, no communication, and what others offer.

    python benchmarks/fit.py [--backend tensorflow|jax|torch] [--ranks 2] [--quick]

It starts its own ranks. All contenders of a table live in one job and train in turn, a short
fit each, so that what else the machine does falls on all of them alike; the first steps of every
fit do not count. A ratio is the median of the ratios round by round. Ranks that but wait for each
other after every step show what the slower one of a step costs, however fast gradients travel.
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
    load,
    options_of,
    parser,
    plotter,
    ratio,
    slug,
    start,
    surroundings,
    table,
)
from contenders import BATCH, time_fits

from keras_dist.launch.microbench import in_turn

CONTENDERS = {
    "none": "no communication",
    "together": "nothing but a barrier a step",
    "ours": "keras_dist",
    "naive": "naive MPI.Allreduce",
    "torch": "plain torch, no communication",
    "ddp": "plain torch, DDP over gloo",
    "parallel": "keras.distribution.DataParallel",
}
# Who trains with which backend.
USUAL = ["none", "together", "ours"]
WITH = {
    "tensorflow": [*USUAL, "naive"],
    "jax": [*USUAL, "parallel"],
    "torch": [*USUAL, "torch", "ddp"],
}
MODELS = {"cnn": "CNN, 4.8 MB", "mlp": "MLP, 40 MB"}
# What share of the speed without communication must be left; and of plain Keras, on one rank.
BOUNDS = {
    "tensorflow": {("cnn", "ours"): 0.97, ("mlp", "ours"): 0.91},
    "jax": {("cnn", "ours"): 0.93, ("mlp", "ours"): 0.85},
    "torch": {("cnn", "ours"): 0.97, ("mlp", "ours"): 0.92},
}
# How many times faster than keras.distribution the MLP must be, on JAX.
TO_PARALLEL = 3.0
ALONE = {"tensorflow": 0.99, "jax": 0.98, "torch": 0.98}


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=list(BOUNDS), default="tensorflow")
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = options.backend
    rounds, steps = (3, 8) if options.quick else (5, 12)

    def job(ranks, task, contenders=(), rounds=rounds):
        size = {"rounds": rounds, "steps": steps, "contenders": list(contenders)}
        return start(__file__, ranks, {"task": task, **size})

    before = load()
    print("contenders on", options.ranks, "ranks ...", flush=True)
    fits = {model: job(options.ranks, model, WITH[options.backend]) for model in MODELS}
    print("one rank ...", flush=True)
    ones = {model: job(0, model, ["none", "ours"], 2 * rounds) for model in MODELS}
    graph = None
    if options.backend == "tensorflow":
        print("gradients of a ResNet-50 through a graph ...", flush=True)
        graph = job(options.ranks, "graph", rounds=5 * rounds)
    print("twice the ranks ...", flush=True)
    crowds = {model: crowd(job, model, options) for model in MODELS}
    report(options, before, fits, ones, graph, crowds)


def crowd(job, model, options):
    """Returns images/s of jobs with the ranks asked for and with twice as many, in turn."""
    few, many = options.ranks, 2 * options.ranks

    def images(ranks):
        return statistics.median(job(ranks, model, ["ours"], rounds=3)["ours"])

    return in_turn([few, many], 1 if options.quick else 2, images)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras_dist

    task = json.loads(Path(path).read_text())
    if "parallel" in task["contenders"]:
        from data_parallel import join_jax

        join_jax()
    keras_dist.init()
    # A job that times JAX or torch needs no TensorFlow.
    if task["task"] == "graph":
        from graph import time_graph

        found = time_graph(task["rounds"])
    else:
        found = time_fits(task)
    if keras_dist.rank() == 0:
        answer(path, found)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, fits, ones, graph, crowds):
    few, many = options.ranks, 2 * options.ranks
    text = [f"# Keras fit, {options.backend}, {BATCH} images a rank and step"]
    text.append(surroundings(before))
    text.append(f"## {few} ranks: images/s in total, and the ratio to no communication\n")
    head = [CONTENDERS[name] for name in next(iter(fits.values()))]
    text.append(table(["model", *head], [line(*item) for item in fits.items()]))
    text.append("\n## One rank: images/s\n")
    body = [line(*item) for item in ones.items()]
    text.append(table(["model", "plain Keras", "keras_dist"], body))
    text.append(f"\n## {few} and {many} ranks: images/s in total\n")
    body = [
        [MODELS[m], *(f"{statistics.median(n[r]):.0f}" for r in (few, many))]
        for m, n in crowds.items()
    ]
    text.append(table(["model", f"{few} ranks", f"{many} ranks"], body))
    if graph is not None:
        through, engine, copy = (statistics.median(graph[c]) for c in ("graph", "engine", "copy"))
        text.append(
            f"\n## {graph['tensors']} tensors, {graph['nbytes'] / 1e6:.0f} MB, through a graph\n\n"
            f"{through:.1f} ms; the engine alone, called with numpy arrays, {engine:.1f} ms; one "
            f"copy of the same bytes by all ranks at once {copy:.1f} ms."
        )
    rows = judge(options, fits, ones, graph, crowds)
    name = slug(f"fit_{options.backend}")
    plot(fits, options.output / f"{name}.png")
    conclude(options.output, name, text, rows)


def line(model, found):
    cells = [
        f"{statistics.median(rates):.0f} ({ratio(rates, found[peer(name)]):.2f})"
        for name, rates in found.items()
    ]
    return [MODELS[model], *cells]


def peer(contender):
    """Returns whose speed a contender's is a share of."""
    return "torch" if contender in ("torch", "ddp") else "none"


def judge(options, fits, ones, graph, crowds):
    rows, ranks = [], options.ranks

    def at_least(what, value, bound):
        rows.append((what, f">= {bound:.2f}", f"{value:.3f}", value >= bound))

    for (model, contender), bound in BOUNDS[options.backend].items():
        value = ratio(fits[model][contender], fits[model]["none"])
        at_least(f"{MODELS[model]}: {CONTENDERS[contender]} to no communication", value, bound)
    for model, found in fits.items() if options.backend == "torch" else ():
        ours, theirs = (
            1 - ratio(found[a], found[b]) for a, b in (("ours", "none"), ("ddp", "torch"))
        )
        what = f"{MODELS[model]}: share lost, less than by DistributedDataParallel"
        rows.append((what, f"< {theirs:.3f}", f"{ours:.3f}", ours < theirs))
    if options.backend == "jax":
        what = f"{MODELS['mlp']}: keras_dist to {CONTENDERS['parallel']}"
        at_least(what, ratio(fits["mlp"]["ours"], fits["mlp"]["parallel"]), TO_PARALLEL)
    for model, found in ones.items():
        value, what = ratio(found["ours"], found["none"]), "one rank to plain Keras"
        at_least(f"{MODELS[model]}: {what}", value, ALONE[options.backend])
    if graph is not None:
        rows += judge_graph(ranks, graph)
    for model, found in crowds.items():
        value = ratio(found[2 * ranks], found[ranks])
        at_least(f"{MODELS[model]}: {2 * ranks} ranks to {ranks} ranks", value, 0.9)
    return rows


def judge_graph(ranks, graph):
    value = ratio(graph["graph"], graph["copy"])
    size = f"{graph['nbytes'] / MIB:.0f} MiB"
    bound = graph["nbytes"] * (1 + 2 / ranks) + 16 * MIB
    memory = f"{graph['memory'] / MIB:.0f} MiB"
    return [
        (f"{size} through a graph to one copy", "<= 1.60", f"{value:.3f}", value <= 1.6),
        (
            f"memory for {size} of gradients, each rank",
            f"<= {bound / MIB:.0f} MiB",
            memory,
            graph["memory"] <= bound,
        ),
    ]


def plot(fits, path):
    pyplot = plotter()
    if pyplot is None:
        return
    figure, axis = pyplot.subplots(figsize=(7, 4))
    contenders = list(next(iter(fits.values())))
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        heights = [ratio(found[contender], found[peer(contender)]) for found in fits.values()]
        places = np.arange(len(fits)) + number * width
        axis.bar_label(
            axis.bar(places, heights, width, label=CONTENDERS[contender]), fmt="%.2f", fontsize=8
        )
    axis.set_xticks(np.arange(len(fits)) + 1.5 * width, [MODELS[model] for model in fits])
    axis.set(ylabel="images/s, ratio to no communication", ylim=(0, 1.25))
    axis.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
