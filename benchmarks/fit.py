"""Times Keras fit on the ranks of one node: keras_dist, no communication, naive MPI.

    python benchmarks/fit.py [--backend tensorflow|jax|torch] [--ranks 2] [--quick]

It starts its own ranks. All contenders of a table live in one job and train in turn, a short
fit each, so that what else the machine does falls on all of them alike; the first steps of every
fit do not count. A ratio is the median of the ratios round by round.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
from common import (
    MIB,
    RESULTS,
    answer,
    in_turn,
    last_line,
    load,
    machine,
    plotter,
    ratio,
    start,
    table,
    verdicts,
    write,
)

BATCH = 128
WARM_STEPS = 4
CONTENDERS = {
    "none": "no communication",
    "ours": "keras_dist",
    "reading": "keras_dist, reading",
    "naive": "naive MPI.Allreduce",
}
MODELS = {"cnn": "CNN, 4.8 MB", "mlp": "MLP, 40 MB"}
# What share of the speed without communication must be left; and of plain Keras, on one rank.
BOUNDS = {
    "tensorflow": {
        ("cnn", "ours"): 0.97,
        ("mlp", "ours"): 0.91,
        ("cnn", "reading"): 0.96,
        ("mlp", "reading"): 0.87,
    },
    "jax": {("cnn", "ours"): 0.93, ("mlp", "ours"): 0.85},
    "torch": {("cnn", "ours"): 0.97, ("mlp", "ours"): 0.92},
}
ALONE = {"tensorflow": 0.99, "jax": 0.98, "torch": 0.98}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=list(BOUNDS), default="tensorflow")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    os.environ["KERAS_BACKEND"] = options.backend
    rounds, steps = (3, 8) if options.quick else (5, 12)

    def job(ranks, task, contenders=(), rounds=rounds):
        size = {"rounds": rounds, "steps": steps, "contenders": list(contenders)}
        return start(__file__, ranks, {"task": task, **size})

    before = load()
    print("contenders on", options.ranks, "ranks ...", flush=True)
    # The naive way and the graph are written in TensorFlow.
    on_tensorflow = options.backend == "tensorflow"
    contenders = [name for name in CONTENDERS if name != "naive" or on_tensorflow]
    fits = {model: job(options.ranks, model, contenders) for model in MODELS}
    print("one rank ...", flush=True)
    ones = {model: job(0, model, ["none", "ours"], 2 * rounds) for model in MODELS}
    graph = None
    if on_tensorflow:
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

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    found = time_graph(task["rounds"]) if task["task"] == "graph" else time_fits(task)
    if keras_dist.rank() == 0:
        answer(path, found)


def time_fits(task):
    """Returns images/s of all ranks together, for each contender and round."""
    from keras_dist import runtime

    steps = WARM_STEPS + task["steps"]
    data = synthetic(steps)
    makers = {name: maker(name, task["task"]) for name in task["contenders"]}
    models = {name: make() for name, (make, _) in makers.items()}

    def images(name):
        with makers[name][1]():
            barrier()
            clock = make_clock(steps)
            models[name].fit(*data, batch_size=BATCH, epochs=1, verbose=0, callbacks=[clock])
        return total(task["steps"] * BATCH / clock.seconds)

    for name in models:
        images(name)
    found = in_turn(models, task["rounds"], images)
    if runtime.size() > 1:
        check_equal({name: model for name, model in models.items() if name != "none"})
    return found


def maker(name, model):
    """Returns a function that makes a contender's model, and the context it trains in."""
    import keras

    import keras_dist

    def plain():
        return compiled(model, keras.optimizers.SGD(0.01))

    def ours():
        return compiled(model, keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)))

    def naive():
        return compiled(model, naive_sgd(0.01))

    if name == "reading":
        return ours, reading_way()
    return {"none": plain, "ours": ours, "naive": naive}[name], contextlib.nullcontext


def reading_way():
    """Returns a context in which keras_dist reads the others' memory, within the same job."""
    from keras_dist import _engine, runtime

    usual = runtime.communicator()
    reading = _engine.Communicator(usual.mpi, None, "read")

    @contextlib.contextmanager
    def context():
        runtime._sets.job = reading
        try:
            yield
        finally:
            runtime._sets.job = usual

    return context


def compiled(name, optimizer):
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if name == "cnn":
        stack = [
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ]
    else:
        stack = [layers.Flatten(), *(layers.Dense(2048, activation="relu") for _ in range(3))]
    model = keras.Sequential([keras.Input((28, 28)), *stack, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    return model


def naive_sgd(rate):
    """Returns an SGD that averages its gradients one by one, as a first attempt would."""
    import keras
    import tensorflow as tf
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def average(gradient):
        out = np.empty_like(gradient)
        world.Allreduce(gradient, out)
        return out / np.float32(world.size)

    class NaiveSGD(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            averaged = []
            for gradient in grads:
                averaged.append(tf.numpy_function(average, [gradient], gradient.dtype))
                averaged[-1].set_shape(gradient.shape)
            return super()._clip_gradients(averaged)

    return NaiveSGD(rate)


def synthetic(steps):
    from keras_dist import runtime

    random = np.random.default_rng(runtime.rank())
    images = random.random((steps * BATCH, 28, 28), np.float32)
    return images, random.integers(0, 10, steps * BATCH)


def make_clock(steps):
    """Returns a callback that takes the seconds from the end of the warm steps to the last."""
    import keras

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch in (WARM_STEPS - 1, steps - 1):
                float(logs["loss"])  # JAX is ahead of its results
                now = time.perf_counter()
                if batch == WARM_STEPS - 1:
                    self.begin = now
                else:
                    self.seconds = now - self.begin

    return Clock()


def check_equal(models):
    """Ends the job unless a contender has left the same weights on every rank."""
    from keras_dist import runtime

    for name, model in models.items():
        sums = [float(np.sum(weight, dtype=np.float64)) for weight in model.get_weights()]
        if len({tuple(row) for row in everyones(sums)}) > 1:
            raise SystemExit(f"{runtime.where()} {name} has left different weights")


def resnet_shapes():
    """Returns the shapes of a ResNet-50's gradients: 54 kernels, a bias, the norms by stage."""
    shapes = [(7, 7, 3, 64)]
    norms, width = [2 * 64], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner, outer = 64 * 2**stage, 256 * 2**stage
        for block in range(blocks):
            if block == 0:
                shapes.append((1, 1, width, outer))
            shapes += [(1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, outer)]
            width = outer
        norms.append(2 * (blocks * (2 * inner + outer) + outer))
    return [*shapes, *((count,) for count in norms), (width, 1000), (1000,)]


def time_graph(rounds):
    """Returns milliseconds of reducing through a TensorFlow graph, and of one numpy copy."""
    import tensorflow as tf

    from keras_dist import _engine, reduction, runtime, terms

    random = np.random.default_rng(runtime.rank())
    arrays = [random.random(shape, np.float32) for shape in resnet_shapes()]
    gradients = [tf.constant(array) for array in arrays]
    variables = [tf.Variable(tf.zeros(shape)) for shape in resnet_shapes()]
    reduce = reduction.GradientReduction(terms.Terms(), lend=True)

    @tf.function(autograph=False)
    def step(gradients):
        # One number of each result, so that every result is there and none is copied.
        return tf.stack([tf.reshape(g, [-1])[0] for g in reduce(gradients, variables)])

    expected = np.mean(everyones([float(array.flat[0]) for array in arrays]), axis=0)
    if not np.allclose(step(gradients).numpy(), expected, rtol=1e-6):
        raise SystemExit(f"{runtime.where()} the graph is wrong")
    source = np.concatenate([array.reshape(-1) for array in arrays])
    target = np.zeros_like(source)
    plan = (
        runtime.communicator(),
        [str(number) for number in range(len(arrays))],
        [(array.shape, array.dtype) for array in arrays],
        _engine.ReduceOp.AVERAGE,
        runtime.bucket_nbytes(runtime.communicator()),
    )
    fused = _engine.FusedAllreduce(*plan, lend=True)
    fused(arrays)
    before = own_memory()
    more = _engine.FusedAllreduce(*plan, lend=True)
    more(arrays)
    memory = max(row[0] for row in everyones([own_memory() - before]))
    del more
    calls = {
        "graph": lambda: step(gradients).numpy(),
        "engine": lambda: fused(arrays),
        "copy": lambda: np.copyto(target, source),
    }

    def milliseconds(name):
        barrier()
        begin = time.perf_counter()
        calls[name]()
        return 1e3 * max(row[0] for row in everyones([time.perf_counter() - begin]))

    for name in calls:
        milliseconds(name)
    found = in_turn(calls, rounds, milliseconds)
    return {**found, "tensors": len(arrays), "nbytes": source.nbytes, "memory": memory}


def own_memory():
    """Returns the bytes of memory of this rank; what ranks share counts by its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def everyones(numbers):
    """Returns the list of numbers of every rank, in rank order."""
    world = mpi_world()
    return [numbers] if world is None else world.allgather(numbers)


def total(number):
    return sum(row[0] for row in everyones([number]))


def barrier():
    world = mpi_world()
    if world is not None:
        world.Barrier()


def mpi_world():
    from keras_dist import runtime

    mpi = runtime.communicator().mpi
    return None if mpi is None else mpi.COMM_WORLD


# --- what came out ---------------------------------------------------------------------------


def report(options, before, fits, ones, graph, crowds):
    few, many = options.ranks, 2 * options.ranks
    text = [f"# Keras fit, {options.backend}, {BATCH} images a rank and step"]
    text.append(f"\n{machine()}; {before}.\n")
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
    text.append("\n## Must reach\n\n" + verdicts(rows))
    print("\n".join(text))
    write(options.output, f"fit_{options.backend}", "\n".join([*text, "", last_line(rows)]))
    plot(fits, options.output / f"fit_{options.backend}.png")
    print(last_line(rows))


def line(model, found):
    cells = [
        f"{statistics.median(rates):.0f} ({ratio(rates, found['none']):.2f})"
        for rates in found.values()
    ]
    return [MODELS[model], *cells]


def judge(options, fits, ones, graph, crowds):
    rows, ranks = [], options.ranks

    def at_least(what, value, bound):
        rows.append((what, f">= {bound:.2f}", f"{value:.3f}", value >= bound))

    for (model, contender), bound in BOUNDS[options.backend].items():
        value = ratio(fits[model][contender], fits[model]["none"])
        at_least(f"{MODELS[model]}: {CONTENDERS[contender]} to no communication", value, bound)
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
        heights = [ratio(found[contender], found["none"]) for found in fits.values()]
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
