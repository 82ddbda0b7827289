"""Measures the peak memory of gradients in a training step on torch, whole and sharded (ZeRO-2).

    python benchmarks/gradient_memory.py [--ranks 2] [--quick]

It starts its own ranks, one job for each contender. The memory is that of the process, by the
kernel: what backpropagation adds at its peak, and what the reduction keeps between two steps, with
the shared memory of all ranks of the node.
"""

import json
import os
from pathlib import Path

from common import MIB, answer, conclude, load, options_of, parser, slug, start, surroundings, table

LAYERS, WIDTH, BATCH = 24, 1024, 32
BOUND = 0.1  # of the gradients, beside the share of a rank
TITLES = {False: "shard_state=True", True: "shard_state=True, shard_gradients=True"}


def main():
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = "torch"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back to the kernel at once
    before, steps = load(), 4 if options.quick else 10
    found = {
        sharded: start(__file__, options.ranks, {"sharded": sharded, "steps": steps})
        for sharded in TITLES
    }
    report(options, before, found)


def work(path):
    import keras
    import numpy as np

    import keras_dist

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    sharded = task["sharded"]
    peaks = []
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = measured([keras.Input((WIDTH,)), *layers], peaks)
    adam = keras.optimizers.Adam(1e-4)
    model.compile(
        keras_dist.DistributedOptimizer(adam, shard_state=True, shard_gradients=sharded), "mse"
    )
    x = np.random.default_rng(keras_dist.rank()).random(
        (task["steps"] * BATCH, WIDTH), dtype=np.float32
    )
    model.fit(x, x, BATCH, shuffle=False, verbose=0, callbacks=keras_dist.callbacks())
    slices = model.optimizer._keras_dist.shards.gradients
    kept = 0 if slices is None else slices.nbytes
    digest = float(sum(np.abs(weight).astype(np.float64).sum() for weight in model.get_weights()))
    everywhere = keras_dist.allgather_object(max(peaks[2:]) + kept)
    if keras_dist.rank() == 0:
        nbytes = sum(weight.nbytes for weight in model.get_weights())
        answer(path, {"peak": max(everywhere), "gradients": nbytes, "digest": digest})


def measured(layers, peaks):
    """Returns a model that appends, in each step, what backpropagation adds to the memory."""
    import keras
    import torch

    class Measured(keras.Sequential):
        def train_step(self, data):
            loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
            self.zero_grad()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
            before = resident("VmRSS")
            loss.backward()
            peaks.append(resident("VmHWM") - before)
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
            return {}

    return Measured(layers)


def resident(name):
    """Returns a size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def report(options, before, found):
    ranks = options.ranks
    if found[True]["digest"] != found[False]["digest"]:
        raise SystemExit("shard_gradients=True has left other weights")
    text = [f"# Memory of gradients, torch, {LAYERS} layers of {WIDTH} units, {ranks} ranks"]
    text.append(surroundings(before))
    shares = {sharded: one["peak"] / one["gradients"] for sharded, one in found.items()}
    body = [
        [TITLES[sharded], f"{one['peak'] / MIB:.1f} MiB", f"{shares[sharded]:.2f}"]
        for sharded, one in found.items()
    ]
    text.append(table(["", "gradients of a rank, at their peak", "of all gradients"], body))
    bound = 1 / ranks + BOUND
    ratio = found[True]["peak"] / found[False]["peak"]
    rows = [("sharded gradients to whole ones", f"<= {bound:.2f}", f"{ratio:.3f}", ratio <= bound)]
    conclude(options.output, slug("gradient_memory"), text, rows)


if __name__ == "__main__":
    main()
