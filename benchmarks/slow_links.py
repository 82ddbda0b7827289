"""Times Keras fit on two hosts with slow links: local steps, every step, and what torch has.

    python benchmarks/slow_links.py [--backends tensorflow jax torch] [--gbit 1 2.5] [--quick]
    python benchmarks/slow_links.py --models wide --resume   # goes on after an interrupted run

The hosts are network namespaces of this machine, see scripts/hosts: root is needed. One rank on
each computes with one thread. All contenders of a table train in turn within one job, a short fit
each, so that what else the machine does falls on all of them alike. One with local steps is
measured over as many steps as a round has, with the exchange that belongs to it; others over a few.
"""

import json
import statistics
from pathlib import Path

from common import answer, conclude, load, options_of, parser, ratio, slug, surroundings, table
from contenders import LOCAL, LOCAL_STEPS, time_fits
from host_jobs import Unavailable, start_on_hosts
from models import MODELS

FEW_STEPS = 6
# By contender: its title, and whose speed its own is a share of.
CONTENDERS = {
    "none": ("no communication", "none"),
    "local": (f"keras_dist, LocalSteps({LOCAL_STEPS})", "none"),
    "streaming": ("the same, 2 fragments, 8 steps late", "none"),
    "streaming_int8": ("the same in int8", "none"),
    "ours": ("keras_dist, every step", "none"),
    "loop": ("plain torch, no communication", "loop"),
    "ddp": ("DDP over gloo", "loop"),
    "post_local": (f"PostLocalSGDOptimizer, {LOCAL_STEPS} steps", "loop"),
}
OF_KERAS, OF_TORCH = ["none", *LOCAL, "ours"], ["loop", "ddp", "post_local"]
KEPT = {1: 0.9, 2.5: 0.95}  # by Gbit/s: share of no communication that local steps keep at least
TIMES_DDP = {1: 3.5, 2.5: 2.0}


def main():
    made = parser(__doc__)
    made.add_argument("--backends", nargs="+", default=["tensorflow", "jax", "torch"])
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=["wide", "transformer"])
    made.add_argument("--gbit", type=float, nargs="+", default=[1, 2.5], help="of each link")
    made.add_argument("--delay-ms", type=float, default=0, help="of a packet, in each direction")
    made.add_argument("--resume", action="store_true", help="measure only what is not known yet")
    options = options_of(made, work)
    before, kept = load(), options.output / f"{name_of(options)}.json"
    known = json.loads(kept.read_text()) if options.resume and kept.exists() else {}
    for gbit in options.gbit:
        for model in options.models:
            jobs = {backend: (backend, OF_KERAS) for backend in options.backends}
            jobs["ddp"] = "torch", OF_TORCH
            for name, (backend, contenders) in jobs.items():
                if (key := key_of(gbit, model, name)) in known:
                    continue
                rounds = 1 if options.quick else 5
                steps = {contender: steps_of(contender) for contender in contenders}
                task = {"task": model, "rounds": rounds, "contenders": contenders, "steps": steps}
                environment = {"KERAS_BACKEND": backend, "KERAS_DIST_THREADS": "1"}
                try:
                    delay = options.delay_ms / 1e3
                    found = start_on_hosts(__file__, 2, 1, task, gbit, environment, delay)
                except Unavailable as error:
                    made.error(f"no test hosts: {error}")
                known[key] = found
                kept.write_text(json.dumps(known))
                rates = (f"{name} {statistics.median(r):.0f}" for name, r in found.items())
                print(key, *rates, flush=True)
    report(options, before, known)


def name_of(options):
    return slug("slow_links" + (f"_{options.delay_ms:g}_ms" if options.delay_ms else ""))


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


def steps_of(contender):
    if contender in LOCAL:  # until the last average has been applied
        return LOCAL_STEPS + LOCAL[contender][0].get("delay", 0)
    return LOCAL_STEPS if contender == "post_local" else FEW_STEPS


# --- what came out ---------------------------------------------------------------------------


def report(options, before, known):
    text = ["# Keras fit on two hosts with slow links, one rank on each", surroundings(before)]
    text.append("Samples/s in total, and the share of the speed without communication.")
    rows = []
    for gbit in options.gbit:
        for model in options.models:
            heading = f"{MODELS[model].title}, links of {gbit:g} Gbit/s"
            heading += f", {options.delay_ms:g} ms each way" if options.delay_ms else ""
            found = {name: known[key_of(gbit, model, name)] for name in [*options.backends, "ddp"]}
            text.append(f"\n## {heading}\n")
            ours = {name: found[name] for name in options.backends}
            text += [tabulated(ours, OF_KERAS), "", tabulated({"torch": found["ddp"]}, OF_TORCH)]
            rows += judge(heading, found, gbit)
    conclude(options.output, name_of(options), text, rows)


def tabulated(found, contenders):
    body = [
        [backend, *(f"{statistics.median(r[c]):.0f} ({share(r, c):.2f})" for c in contenders)]
        for backend, r in found.items()
    ]
    return table(["backend", *(CONTENDERS[name][0] for name in contenders)], body)


def share(rates, name):
    """Returns the speed of a contender as a share of that without communication."""
    return ratio(rates[name], rates[CONTENDERS[name][1]])


def judge(heading, found, gbit):
    rows, ddp = [], share(found["ddp"], "ddp")
    for backend, rates in found.items():
        if backend == "ddp" or gbit not in KEPT:
            continue
        kept, bound = share(rates, "local"), KEPT[gbit]
        what = f"{heading}: {backend}, share kept"
        rows.append((what, f">= {bound:.2f}", f"{kept:.3f}", kept >= bound))
        times, bound = kept / ddp, TIMES_DDP[gbit]
        what = f"{heading}: {backend}, share kept, to that of DDP"
        rows.append((what, f">= {bound:.1f} x", f"{times:.2f} x", times >= bound))
    return rows


if __name__ == "__main__":
    main()
