"""Times loops by hand in torch on the ranks of one node: keras_dist.torch beside DDP over gloo.

    python benchmarks/torch_loops.py [--ranks 2] [--quick]

It starts its own ranks. Contenders live in one job and take turns; a ratio is the median of the
ratios round by round, a time the median of all rounds.
"""

import json
import statistics
import time
from pathlib import Path

import numpy as np
from common import (
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
from ranks import barrier, time_calls, total
from turns import in_turn

BATCH, WARM_STEPS = 64, 3
SMALL, SMALL_NBYTES = 160, 64 * 1024
LOOPS = {"none": "no communication", "ddp": "DDP over gloo", "hvd": "keras_dist.torch"}
CALLS = {
    "allreduce": "allreduce of 4 KiB",
    "grouped": f"{SMALL} tensors of 64 KiB, grouped",
    "one": "one tensor of the same bytes",
}


def main():
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    before = load()
    size = {"rounds": 3, "steps": 6} if options.quick else {"rounds": 9, "steps": 12}
    report(options, before, start(__file__, options.ranks, size))


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist.torch as hvd

    task = json.loads(Path(path).read_text())
    hvd.init()
    found = {name: time_steps(name, task) for name in ("mlp", "cnn")}
    found["calls"] = time_single_calls(task)
    if hvd.rank() == 0:
        answer(path, found)


def time_steps(model, task):
    """Returns images/s of all ranks together, by contender."""
    import torch
    import torch_loop

    import keras_dist.torch as hvd

    make = {"mlp": torch_loop.mlp, "cnn": torch_loop.cnn}[model]
    loops = {name: torch_loop.Loop(make(), averages=name == "ddp") for name in LOOPS}
    hvd.DistributedOptimizer(loops["hvd"].optimizer)
    steps = WARM_STEPS + task["steps"]
    random = np.random.default_rng(hvd.rank())
    images = random.random((steps * BATCH, 28, 28), np.float32)
    labels = random.integers(0, 10, steps * BATCH)

    def speed(name):
        barrier()
        clock = Clock()
        loops[name].fit(images, labels, BATCH, clock.count)
        rate = task["steps"] * BATCH / (time.perf_counter() - clock.begin)
        return total(rate)

    for name in loops:
        speed(name)
    found = in_turn(loops, task["rounds"], speed)
    trained = [torch_loop.weights_of(loops[name].model) for name in ("hvd", "ddp")]
    pairs = zip(*trained, strict=True)
    if not all(torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5) for mine, theirs in pairs):
        raise SystemExit(f"{model}: the two do not train alike")
    return found


class Clock:
    """Takes the time when the first steps are over."""

    steps = 0

    def count(self, logs):
        self.steps += 1
        if self.steps == WARM_STEPS:
            self.begin = time.perf_counter()


def time_single_calls(task):
    """Returns milliseconds of calls, those of the slowest rank."""
    import torch

    import keras_dist.torch as hvd

    small = [torch.randn(SMALL_NBYTES // 4) for _ in range(SMALL)]
    tiny, one = torch.randn(1024), torch.cat(small)
    calls = {
        "allreduce": lambda: hvd.allreduce(tiny),
        "grouped": lambda: hvd.grouped_allreduce(small),
        "one": lambda: hvd.allreduce(one),
    }

    return time_calls(calls, 5 * task["rounds"])


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = [f"# Loops by hand in torch, {options.ranks} ranks"]
    text.append(surroundings(before))
    text.append(f"## {BATCH} images a rank and step: images/s of all ranks\n")
    body = [
        [model, *(f"{statistics.median(found[model][name]):.0f}" for name in LOOPS)]
        for model in ("mlp", "cnn")
    ]
    text.append(table(["model", *LOOPS.values()], body))
    text.append("\n## Calls\n")
    calls = found["calls"]
    body = [
        [what, f"{statistics.median(calls[name]):.3f}", f"{min(calls[name]):.3f}"]
        for name, what in CALLS.items()
    ]
    text.append(table(["call", "ms, median", "least"], body))
    rows = judge(found)
    conclude(options.output, slug("loops_torch"), text, rows)


def judge(found):
    rows = []
    for model, bound in (("mlp", 1.1), ("cnn", 1.0)):
        times = ratio(found[model]["hvd"], found[model]["ddp"])
        row = f"{model}: keras_dist.torch to DDP", f">= {bound:.2f}", f"{times:.3f}"
        rows.append((*row, times >= bound))
    took = statistics.median(found["calls"]["allreduce"])
    many = ratio(found["calls"]["grouped"], found["calls"]["one"])
    rows.append((CALLS["allreduce"], "< 0.300 ms", f"{took:.3f}", took < 0.3))
    rows.append((f"{SMALL} small tensors to one", "<= 1.30", f"{many:.3f}", many <= 1.3))
    return rows


if __name__ == "__main__":
    main()
