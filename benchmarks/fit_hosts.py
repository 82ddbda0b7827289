"""Times Keras fit on two hosts with one rank each: how much of the communication is hidden.

    python benchmarks/fit_hosts.py [--backends tensorflow jax torch] [--gbit 0 2.5] [--quick]
    python benchmarks/fit_hosts.py --models mlp --resume     # goes on after an interrupted run

The hosts are network namespaces of this machine, see scripts/hosts: root is needed. Each rank
computes with one thread. Contenders of a table train in turn within one job, a short fit each. What
is hidden is the part of the time that communication adds to a step without overlap, and does not
add with it. The limit is the share that a wire used without a gap would leave: it is used from the
moment at which the first bucket of gradients is complete.
"""

import json
import statistics
from pathlib import Path

from common import (
    answer,
    conclude,
    load,
    options_of,
    parser,
    ratio,
    slug,
    surroundings,
    table,
)
from contenders import time_fits
from host_jobs import Unavailable, start_on_hosts
from models import MODELS

OURS = ["cnn", "mlp"]
# By contender: its title, and whose speed its own is a share of.
CONTENDERS = {
    "none": ("no communication", "none"),
    "ours": ("keras_dist", "none"),
    "apart": ("keras_dist, no overlap", "none"),
    "naive": ("naive MPI.Allreduce", "none"),
    "loop": ("plain torch, no communication", "loop"),
    "ddp": ("plain torch, DDP over gloo", "loop"),
    "ddp_apart": ("DDP, no overlap", "loop"),
}
OF_KERAS = ["none", "ours", "apart", "naive"]
OF_TORCH = ["loop", "ddp", "ddp_apart"]
TO_DDP, TO_NAIVE, TO_APART = 1.3, 1.15, 1.0
# By model: bytes of its gradients, and the part of a step's computation before its first bucket is
# complete, by counting multiplications: the forward pass, and the gradient of the kernel of the
# last large layer.
GRADIENTS = {"mlp": (40_083_496, 0.5), "cnn": (4_799_528, 0.37)}


def main():
    made = parser(__doc__)
    made.add_argument("--backends", nargs="+", default=["tensorflow", "jax", "torch"])
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=OURS)
    made.add_argument(
        "--gbit", type=float, nargs="+", default=[0, 2.5], help="Gbit/s of each link; 0: no limit"
    )
    made.add_argument(
        "--resume", action="store_true", help="measure only what an earlier run lacks"
    )
    options = options_of(made, work)
    rounds, steps = (1, 1) if options.quick else (3, 4)
    before = load()
    kept = options.output / f"{slug('fit_hosts')}.json"
    runs = json.loads(kept.read_text()) if options.resume and kept.exists() else {}
    for gbit in options.gbit:
        for model in options.models:
            # One job for each framework, and one without Keras' own for DDP.
            jobs = {backend: (backend, OF_KERAS) for backend in options.backends}
            jobs["ddp"] = "torch", OF_TORCH
            for name, (backend, contenders) in jobs.items():
                if (key := key_of(gbit, model, name)) in runs:
                    continue
                task = {"task": model, "rounds": rounds, "steps": steps, "contenders": contenders}
                print(link(gbit), MODELS[model].title, name, "...", flush=True)
                environment = {"KERAS_BACKEND": backend, "KERAS_DIST_THREADS": "1"}
                try:
                    found = start_on_hosts(__file__, 2, 1, task, gbit, environment)
                except Unavailable as error:
                    made.error(f"no test hosts: {error}")
                runs[key] = found
                kept.write_text(json.dumps(runs))
                print(*(f"{c} {statistics.median(r):.0f}" for c, r in found.items()), flush=True)
    report(options, before, runs)


def key_of(gbit, model, name):
    return f"{gbit:g} {model} {name}"


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    found = time_fits(task)
    if keras_dist.rank() == 0:
        answer(path, found)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, runs):
    text = ["# Keras fit on two hosts, one rank on each"]
    text.append(surroundings(before))
    text.append("Samples/s in total, and the share of the speed without communication.")
    rows = []
    for gbit in options.gbit:
        for model in options.models:
            names = [*options.backends, "ddp"]
            found = {name: runs[key_of(gbit, model, name)] for name in names}
            text.append(f"\n## {MODELS[model].title}, {link(gbit)}\n")
            ours = {name: found[name] for name in options.backends}
            text += [tabulated(ours, OF_KERAS, model, gbit), ""]
            text.append(tabulated({"torch": found["ddp"]}, OF_TORCH, model, gbit))
            rows += judge(f"{MODELS[model].title}, {link(gbit)}", found, model, gbit)
    name = "_".join(["fit_hosts", *(options.models if options.models != OURS else [])])
    conclude(options.output, slug(name), text, rows)


def link(gbit):
    return f"links of {gbit:g} Gbit/s" if gbit else "links without a limit"


def tabulated(found, contenders, model, gbit):
    none, ours, apart = contenders[0], contenders[1], contenders[2]
    head = ["backend", *(CONTENDERS[name][0] for name in contenders), "hidden", "limit"]
    body = []
    for backend, rates in found.items():
        cells = [
            f"{statistics.median(rates[name]):.0f} ({share(rates, name):.2f})"
            for name in contenders
        ]
        most = limit(rates[none], model, gbit)
        body.append([backend, *cells, f"{hidden(rates, none, ours, apart):.2f}", f"{most:.2f}"])
    return table(head, body)


def share(rates, name):
    """Returns the speed of a contender as a share of that without communication."""
    return ratio(rates[name], rates[CONTENDERS[name][1]])


def hidden(rates, none, overlapping, apart):
    """Returns the share of the communication that is hidden."""
    seconds = [[1 / rate for rate in rates[name]] for name in (apart, overlapping, none)]
    saved = [a - o for a, o in zip(*seconds[:2], strict=True)]
    communication = [a - n for a, n in zip(seconds[0], seconds[2], strict=True)]
    return ratio(saved, communication)


def limit(rates, model, gbit):
    """Returns the share that the wire leaves at most; 1 where nothing is known about it.

    Args:
        rates: samples/s of two ranks without communication.
        model: name of the model.
        gbit: Gbit/s of each link; 0: no limit.
    """
    if model not in GRADIENTS or not gbit:
        return 1.0
    nbytes, before = GRADIENTS[model]
    step = 2 * MODELS[model].batch_size / statistics.median(rates)
    # Each of two hosts sends half of its gradients, and half of the results.
    wire = nbytes * 8e-9 / gbit
    return step / max(step, before * step + wire)


def judge(heading, found, model, gbit):
    rows = []

    def at_least(what, value, bound, most=None):
        measured = f"{value:.2f} x" + (f", limit {most:.2f}" if most else "")
        rows.append((f"{heading}: {what}", f">= {bound:.2f} x", measured, value >= bound))

    ddp = share(found["ddp"], "ddp")
    for backend, rates in found.items():
        if backend != "ddp":
            most = limit(rates["none"], model, gbit)
            ours, naive = share(rates, "ours"), share(rates, "naive")
            at_least(f"{backend} against DDP over gloo", ours / ddp, TO_DDP, most / ddp)
            value = ratio(rates["ours"], rates["naive"])
            at_least(f"{backend} against {CONTENDERS['naive'][0]}", value, TO_NAIVE, most / naive)
            value = ratio(rates["ours"], rates["apart"])
            at_least(f"{backend} against no overlap", value, TO_APART)
    return rows


if __name__ == "__main__":
    main()
