"""Times Keras fit with sharded optimizer state (ZeRO-1), and counts the state of a rank.

    python benchmarks/shard_state.py [--backend tensorflow|jax|torch] [--ranks 2] [--quick]

It starts its own ranks. All contenders live in one job and train the MLP of benchmarks/fit.py in
turn, a short fit each. A ratio is the median of the ratios round by round.
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
from contenders import WARM_STEPS, check_equal, make_barrier, make_clock
from models import MODELS
from ranks import barrier, total
from turns import in_turn

CONTENDERS = {
    "none": "no communication, each rank updates everything",
    "together": "the same with a barrier after each step",
    "whole": "shard_state=False",
    "sharded": "shard_state=True",
}


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = options.backend
    rounds, steps = (3, 6) if options.quick else (5, 10)
    before = load()
    found = start(__file__, options.ranks, {"rounds": rounds, "steps": steps})
    report(options, before, found)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_dist

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    steps = WARM_STEPS + task["steps"]
    mlp = MODELS["mlp"]
    data = mlp.data(steps * mlp.batch_size, keras_dist.rank())

    def make(name):
        adam = keras.optimizers.Adam(0.001)
        if name not in ("none", "together"):
            adam = keras_dist.DistributedOptimizer(adam, shard_state=name == "sharded")
        return mlp.compiled(adam)

    models = {name: make(name) for name in CONTENDERS}

    def images(name):
        barrier()
        clock = make_clock(steps)
        callbacks = [make_barrier(), clock] if name == "together" else [clock]
        # Without shuffling, so that all contenders see the same batches.
        models[name].fit(*data, mlp.batch_size, verbose=0, callbacks=callbacks, shuffle=False)
        return total(task["steps"] * mlp.batch_size / clock.seconds)

    for name in models:
        images(name)
    rates = in_turn(models, task["rounds"], images)
    check_equal({name: models[name] for name in ("whole", "sharded")})
    check_same_bits(models["sharded"], models["whole"])
    nbytes = {name: state_nbytes(model.optimizer) for name, model in models.items()}
    most = {name: max(keras_dist.allgather_object(n)) for name, n in nbytes.items()}
    if keras_dist.rank() == 0:
        answer(path, {"rates": rates, "nbytes": most})


def check_same_bits(model, whole):
    """Ends the job unless the weights have the bits of whole updates."""
    for value, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
        if value.tobytes() != wanted.tobytes():
            raise SystemExit("shard_state=True has left other weights than shard_state=False")


def state_nbytes(optimizer):
    """Returns the size of the state of an optimizer on this rank, in bytes."""
    import keras

    return sum(keras.ops.convert_to_numpy(variable).nbytes for variable in optimizer.variables)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    rates, nbytes, ranks = found["rates"], found["nbytes"], options.ranks
    text = [f"# Sharded optimizer state, {options.backend}, MLP of 40 MB with Adam, {ranks} ranks"]
    text.append(surroundings(before))
    body = [
        [
            title,
            f"{statistics.median(rates[name]):.0f} ({ratio(rates[name], rates['none']):.2f})",
            f"{nbytes[name] / MIB:.1f} MiB",
        ]
        for name, title in CONTENDERS.items()
    ]
    head = ["", "images/s of all ranks, ratio to no communication", "state of a rank, at most"]
    text.append(table(head, body))
    speed = ratio(rates["sharded"], rates["none"])
    share = nbytes["sharded"] / nbytes["none"]
    rows = [
        ("shard_state=True to no communication", ">= 1.00", f"{speed:.3f}", speed >= 1),
        (
            "state of a rank to that of one rank",
            f"<= {1 / ranks + 0.05:.2f}",
            f"{share:.3f}",
            share <= 1 / ranks + 0.05,
        ),
    ]
    conclude(options.output, slug(f"shard_state_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
