"""Compares fits of text models whose losses are weighed by the tokens of all ranks with others.

    python benchmarks/losses.py [--backends tensorflow jax torch] [--models tagger lstm]

The tokens of a batch that are not masked differ in number between the ranks, so the ranks exchange
the numbers in each step. The other fit averages the gradients of the ranks as they are. Both train
in turn in one job, a short fit each; the ratio is the median of the ratios round by round.
"""

import contextlib
import json
import statistics
from pathlib import Path
from unittest import mock

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

BOUND = 0.97
WORDS, LENGTH, TAGS, BATCH = 10_000, 64, 20, 32
TITLES = {"tagger": "Embedding, 3 dense layers", "lstm": "Embedding, LSTM, dense layer"}
STEPS = {"tagger": 40, "lstm": 10}


def main():
    made = parser(__doc__)
    backends = ["tensorflow", "jax", "torch"]
    made.add_argument("--backends", nargs="+", choices=backends, default=backends)
    made.add_argument("--models", nargs="+", choices=list(TITLES), default=list(TITLES))
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    before, found = load(), {}
    rounds = 3 if options.quick else 9
    for backend in options.backends:
        for model in options.models:
            print(backend, model, "...", flush=True)
            task = {"model": model, "rounds": rounds, "steps": STEPS[model]}
            found[backend, model] = start(
                __file__, options.ranks, task, KERAS_BACKEND=backend, CUDA_VISIBLE_DEVICES=""
            )
    report(options, before, found)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    from contenders import WARM_STEPS, make_clock
    from ranks import barrier, total
    from turns import in_turn

    steps = WARM_STEPS + task["steps"]
    fits = {name: make_fit(task["model"], steps, name) for name in ("weighed", "averaged")}

    def rate(name):
        barrier()
        clock = make_clock(steps)
        fits[name](clock)
        return total(task["steps"] / clock.seconds) / keras_dist.size()

    for name in fits:
        rate(name)
    found = in_turn(fits, task["rounds"], rate)
    if keras_dist.rank() == 0:
        answer(path, found)


def make_fit(name, steps, contender):
    """Returns a function of a clock that trains a model."""
    import keras
    from contenders import Fit
    from keras import layers

    import keras_dist

    keras.utils.set_random_seed(0)
    stack = [keras.Input((LENGTH,), dtype="int32")]
    stack.append(layers.Embedding(WORDS, 64, mask_zero=True))
    if name == "lstm":
        stack.append(layers.LSTM(128, return_sequences=True))
    else:
        stack += [layers.Dense(128, activation="relu"), layers.Dense(128, activation="relu")]
    model = keras.Sequential([*stack, layers.Dense(TAGS)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss)
    data = keras_dist.data.shard(text(steps * BATCH * keras_dist.size()), batch_size=BATCH)
    scope = unweighed if contender == "averaged" else contextlib.nullcontext
    return Fit(model, (data,), keras_dist.callbacks, scope)


def text(count):
    """Returns sentences of different lengths, padded with 0, and a tag for each word."""
    random = np.random.default_rng(0)
    words = random.integers(1, WORDS, (count, LENGTH), dtype="int32")
    lengths = random.integers(LENGTH // 4, LENGTH + 1, (count, 1))
    words[np.arange(LENGTH) >= lengths] = 0
    return words, random.integers(0, TAGS, (count, LENGTH), dtype="int32")


def unweighed():
    """Returns a context in which the losses of a step are those of this rank."""
    from keras_dist.training import train_functions

    return mock.patch.object(train_functions, "within", lambda *_: contextlib.nullcontext())


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = ["# Losses with masks", surroundings(before)]
    text.append(f"## {options.ranks} ranks: steps/s\n")
    body, rows = [], []
    for (backend, model), rates in found.items():
        value = ratio(rates["weighed"], rates["averaged"])
        speeds = [f"{statistics.median(rates[name]):.0f}" for name in ("averaged", "weighed")]
        body.append([backend, TITLES[model], *speeds, f"{value:.3f}"])
        what = f"{backend}, {TITLES[model]}: weighed to averaged"
        rows.append((what, f">= {BOUND:.2f}", f"{value:.3f}", value >= BOUND))
    text.append(table(["backend", "model", "averaged", "weighed by tokens", "ratio"], body))
    conclude(options.output, slug("losses"), text, rows)


if __name__ == "__main__":
    main()
