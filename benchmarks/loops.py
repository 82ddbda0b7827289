"""Times loops by hand in TensorFlow on the ranks of one node: keras_dist.tensorflow.

    python benchmarks/loops.py [--ranks 2] [--quick]

It starts its own ranks. Contenders live in one job and take turns; a ratio is the median of the
ratios round by round, a time the median of all rounds.
"""

import json
import os
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
from contenders import WARM_STEPS, check_equal
from models import MODELS
from ranks import barrier, time_calls, total
from turns import in_turn

MLP = MODELS["mlp"]
BATCH = MLP.batch_size
SMALL = 160  # tensors, of
SMALL_NBYTES = 64 * 1024
STEPS = {
    "none": "no communication",
    "tape": "DistributedGradientTape",
    "optimizer": "DistributedOptimizer",
}
CALLS = {
    "allreduce": "allreduce of 4 KiB",
    "grouped": f"{SMALL} tensors of 64 KiB, grouped",
    "one": "one tensor of the same bytes",
    "grouped in a graph": f"{SMALL} tensors of 64 KiB, grouped, in a tf.function",
    "one in a graph": "one tensor of the same bytes, in a tf.function",
}


def main():
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    before = load()
    size = {"rounds": 3, "steps": 8} if options.quick else {"rounds": 9, "steps": 12}
    report(options, before, start(__file__, options.ranks, size))


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist.tensorflow as hvd

    task = json.loads(Path(path).read_text())
    hvd.init()
    found = {"steps": time_steps(task), "calls": time_single_calls(task)}
    if hvd.rank() == 0:
        answer(path, found)


def time_steps(task):
    """Returns images/s of all ranks together of a step in a tf.function, the MLP of 40 MB."""
    import tensorflow as tf

    import keras_dist.tensorflow as hvd

    steps = WARM_STEPS + task["steps"]
    images, labels = (tf.constant(one) for one in MLP.data(steps * BATCH, hvd.rank()))
    models = {name: MLP.compiled(tf.optimizers.SGD(0.01)) for name in STEPS}
    hvd.DistributedOptimizer(models["optimizer"].optimizer)

    def make_step(name, model):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            if name == "tape":
                tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step

    trains = {name: make_step(name, model) for name, model in models.items()}

    def speed(name):
        barrier()
        for number in range(steps):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            float(trains[name](images[rows], labels[rows]))
            if number == WARM_STEPS - 1:
                begin = time.perf_counter()
        rate = task["steps"] * BATCH / (time.perf_counter() - begin)
        return total(rate)

    for name in trains:
        speed(name)
    found = in_turn(trains, task["rounds"], speed)
    check_equal({name: models[name] for name in ("tape", "optimizer")})
    return found


def time_single_calls(task):
    """Returns milliseconds of eager calls and of calls of a graph, those of the slowest rank."""
    import tensorflow as tf

    import keras_dist.tensorflow as hvd

    small = [tf.random.normal([SMALL_NBYTES // 4]) for _ in range(SMALL)]
    tiny, one = tf.random.normal([1024]), tf.concat(small, 0)

    # Their tensors are in the graph, as those of a training step are.
    @tf.function
    def grouped_in_graph():
        return hvd.grouped_allreduce([tensor + 1 for tensor in small])[-1][0]

    @tf.function
    def one_in_graph():
        return hvd.allreduce(one + 1)[0]

    calls = {
        "allreduce": lambda: hvd.allreduce(tiny),
        "grouped": lambda: hvd.grouped_allreduce(small),
        "one": lambda: hvd.allreduce(one),
        "grouped in a graph": grouped_in_graph,
        "one in a graph": one_in_graph,
    }

    return time_calls(calls, 5 * task["rounds"])


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    steps, calls = found["steps"], found["calls"]
    text = [f"# Loops by hand in TensorFlow, {options.ranks} ranks"]
    text.append(surroundings(before))
    text.append(f"## The MLP of 40 MB in a tf.function, {BATCH} images a rank and step: images/s\n")
    rates = [f"{statistics.median(steps[name]):.0f}" for name in STEPS]
    text.append(table([*STEPS.values()], [rates]))
    text.append("\n## Calls\n")
    body = [
        [what, f"{statistics.median(calls[name]):.3f}", f"{min(calls[name]):.3f}"]
        for name, what in CALLS.items()
    ]
    text.append(table(["call", "ms, median", "least"], body))
    rows = judge(steps, calls)
    conclude(options.output, slug("loops_tensorflow"), text, rows)


def judge(steps, calls):
    kept = ratio(steps["tape"], steps["none"])
    took = float(np.median(calls["allreduce"]))
    eager = ratio(calls["grouped"], calls["one"])
    graph = ratio(calls["grouped in a graph"], calls["one in a graph"])
    many = f"{SMALL} small tensors to one"
    return [
        ("MLP: the tape to no communication", ">= 0.92", f"{kept:.3f}", kept >= 0.92),
        (CALLS["allreduce"], "< 0.300 ms", f"{took:.3f}", took < 0.3),
        (f"{many}, eagerly", "<= 1.30", f"{eager:.3f}", eager <= 1.3),
        (f"{many}, in a tf.function", "<= 1.30", f"{graph:.3f}", graph <= 1.3),
    ]


if __name__ == "__main__":
    main()
