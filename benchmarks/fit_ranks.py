"""Times Keras fit on one rank and on twice the ranks, and gradients in a graph of TensorFlow.

    python benchmarks/fit_ranks.py [--backend tensorflow|jax|torch] [--ranks 2] [--quick]

It starts its own ranks, and trains the MLP and the CNN of `benchmarks/fit.py` in the same way.
"""

import json
import os
import statistics
from pathlib import Path

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
from models import MODELS
from turns import in_turn

CHOSEN = ("mlp", "cnn")
ALONE = {"tensorflow": 0.99, "jax": 0.98, "torch": 0.98}


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=list(ALONE), default="tensorflow")
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = options.backend
    rounds, steps = (3, 5) if options.quick else (5, 10)

    def job(ranks, task, contenders=(), rounds=rounds):
        size = {"rounds": rounds, "steps": steps, "contenders": list(contenders)}
        return start(__file__, ranks, {"task": task, **size})

    before = load()
    print("one rank ...", flush=True)
    ones = {model: job(0, model, ["none", "ours"], 2 * rounds) for model in CHOSEN}
    graph = None
    if options.backend == "tensorflow":
        print("gradients of a ResNet-50 through a graph ...", flush=True)
        graph = job(options.ranks, "graph", rounds=5 * rounds)
    print("twice the ranks ...", flush=True)
    crowds = {model: crowd(job, model, options) for model in CHOSEN}
    report(options, before, ones, graph, crowds)


def crowd(job, model, options):
    """Returns samples/s of jobs with the ranks asked for and with twice as many, in turn."""
    few, many = options.ranks, 2 * options.ranks

    def rate(ranks):
        return statistics.median(job(ranks, model, ["ours"], rounds=3)["ours"])

    return in_turn([few, many], 1 if options.quick else 2, rate)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    # A job that times JAX or torch needs no TensorFlow.
    if task["task"] == "graph":
        from graph import time_graph

        found = time_graph(task["rounds"])
    else:
        from contenders import time_fits

        found = time_fits(task)
    if keras_dist.rank() == 0:
        answer(path, found)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, ones, graph, crowds):
    few, many = options.ranks, 2 * options.ranks
    text = [f"# Keras fit by number of ranks, {options.backend}"]
    text.append(surroundings(before))
    text.append("## One rank: samples/s\n")
    body = [
        [
            MODELS[model].title,
            f"{statistics.median(found['none']):.0f}",
            f"{statistics.median(found['ours']):.0f} ({ratio(found['ours'], found['none']):.2f})",
        ]
        for model, found in ones.items()
    ]
    text.append(table(["model", "plain Keras", "keras_dist"], body))
    text.append(f"\n## {few} and {many} ranks: samples/s in total\n")
    body = [
        [MODELS[m].title, *(f"{statistics.median(n[r]):.0f}" for r in (few, many))]
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
    rows = judge(options, ones, graph, crowds)
    conclude(options.output, slug(f"fit_ranks_{options.backend}"), text, rows)


def judge(options, ones, graph, crowds):
    rows, ranks = [], options.ranks

    def at_least(what, value, bound):
        rows.append((what, f">= {bound:.2f}", f"{value:.3f}", value >= bound))

    for model, found in ones.items():
        value, what = ratio(found["ours"], found["none"]), "one rank to plain Keras"
        at_least(f"{MODELS[model].title}: {what}", value, ALONE[options.backend])
    if graph is not None:
        rows += judge_graph(ranks, graph)
    for model, found in crowds.items():
        value = ratio(found[2 * ranks], found[ranks])
        at_least(f"{MODELS[model].title}: {2 * ranks} ranks to {ranks} ranks", value, 0.9)
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


if __name__ == "__main__":
    main()
