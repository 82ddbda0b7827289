"""Times Keras fit on the ranks of one node: keras_dist, no communication, and what others offer.

    python benchmarks/fit.py [--backend tensorflow|jax|torch] [--ranks 2] [--models mlp lstm]

It starts its own ranks, for each model a job. All contenders live in the job and train in turn, a
short fit each, so that what else the machine does falls on all of them alike; the first steps of
every fit do not count. A ratio is the median of the ratios round by round. keras_dist trains as in
the README: `data.shard`, `DistributedOptimizer`, `callbacks()`. Ranks that only wait for each other
after every step show what the slower one of a step costs, however fast gradients travel.
"""

import json
import os
import statistics
from pathlib import Path

import numpy as np
from common import (
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
from models import MODELS

CONTENDERS = {
    "none": "no communication",
    "together": "nothing but a barrier",
    "ours": "keras_dist",
    "naive": "naive MPI.Allreduce",
    "loop": "loop in torch, no communication",
    "ddp": "loop in torch, DDP over gloo",
    "parallel": "keras.distribution.DataParallel",
}
# Who trains with which backend; the last one is the peer.
USUAL = ["none", "together", "ours"]
WITH = {
    "tensorflow": [*USUAL, "naive"],
    "jax": [*USUAL, "parallel"],
    "torch": [*USUAL, "loop", "ddp"],
}
# What share of the speed of ranks that only wait for each other must be left.
BOUNDS = {"tensorflow": 0.98, "jax": 0.97, "torch": 0.97}
STEPS = {"resnet50": 4}


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=list(BOUNDS), default="tensorflow")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--models", nargs="*", default=list(MODELS), help="all by default")
    made.add_argument("--add", action="store_true", help="keep the other models of the last run")
    options = options_of(made, work)
    if unknown := set(options.models) - set(MODELS):
        made.error(f"no model {', '.join(unknown)}: {', '.join(MODELS)}")
    os.environ["KERAS_BACKEND"] = options.backend
    before, found = load(), {}
    raw = options.output / f"{slug(f'fit_{options.backend}')}.json"
    if options.add and raw.exists():
        found = json.loads(raw.read_text())
    for model in options.models:
        print(model, "...", flush=True)
        steps = 6 if options.quick else STEPS.get(model, 10)
        task = {"task": model, "rounds": 3 if options.quick else 5, "steps": steps}
        contenders = WITH[options.backend]
        found[model] = start(__file__, options.ranks, {**task, "contenders": contenders})
        raw.write_text(json.dumps(found))
    report(options, before, {name: found[name] for name in MODELS if name in found})


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    task = json.loads(Path(path).read_text())
    if "parallel" in task["contenders"]:
        from data_parallel import join_jax

        join_jax()
    keras_dist.init()
    from contenders import time_fits

    found = time_fits(task)
    if keras_dist.rank() == 0:
        answer(path, found)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, fits):
    text = [f"# Keras fit, {options.backend}"]
    rounds = len(next(iter(fits.values()))["ours"])
    text.append(f"{surroundings(before)}Medians of {rounds} rounds.\n")
    text.append(
        f"## {options.ranks} ranks: samples/s in total, and the ratio to no communication\n"
    )
    head = [CONTENDERS[name] for name in WITH[options.backend]]
    text.append(table(["model", *head], [line(*item) for item in fits.items()]))
    name = slug(f"fit_{options.backend}")
    plot(fits, options.output / f"{name}.png")
    conclude(options.output, name, text, judge(options.backend, fits))


def line(model, found):
    cells = [
        f"{statistics.median(rates):.0f} ({ratio(rates, found[base(name)]):.2f})"
        for name, rates in found.items()
    ]
    return [MODELS[model].title, *cells]


def base(contender):
    """Returns whose speed a contender's is a share of."""
    return "loop" if contender in ("loop", "ddp") else "none"


def judge(backend, fits):
    """Returns the rows of what must be reached.

    The peer in torch has a loop of its own, which is compared by the share that it keeps.
    """
    rows, bound, peer = [], BOUNDS[backend], WITH[backend][-1]
    for model, found in fits.items():
        value = ratio(found["ours"], found["together"])
        what = f"{MODELS[model].title}: keras_dist to {CONTENDERS['together']}"
        rows.append((what, f">= {bound:.2f}", f"{value:.3f}", value >= bound))
    for model, found in fits.items():
        if base(peer) == "none":
            value = ratio(found["ours"], found[peer])
            what = f"{MODELS[model].title}: keras_dist to {CONTENDERS[peer]}"
        else:
            kept = [ratio(found[name], found[base(name)]) for name in ("ours", peer)]
            value = kept[0] / kept[1]
            what = f"{MODELS[model].title}: share kept, to that of DDP"
        rows.append((what, "> 1.00", f"{value:.3f}", value > 1))
    return rows


def plot(fits, path):
    pyplot = plotter()
    if pyplot is None:
        return
    figure, axis = pyplot.subplots(figsize=(2 + 1.6 * len(fits), 4))
    contenders = list(next(iter(fits.values())))
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        heights = [ratio(found[contender], found[base(contender)]) for found in fits.values()]
        places = np.arange(len(fits)) + number * width
        axis.bar_label(
            axis.bar(places, heights, width, label=CONTENDERS[contender]), fmt="%.2f", fontsize=8
        )
    titles = [MODELS[model].title.split(",")[0] for model in fits]
    axis.set_xticks(np.arange(len(fits)) + 1.5 * width, titles)
    axis.set(ylabel="samples/s, ratio to no communication", ylim=(0, 1.3))
    axis.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
