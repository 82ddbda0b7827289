"""Reductions in GPU memory: equal replicas, 100 MB by NCCL and through the host, and ResNet-50.

Two ranks use two GPUs, or share one, which NCCL supports from version 2.30 on. Without a GPU
nothing is measured. Every part is a job with a time limit; all parts take less than ten minutes.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import (
    answer,
    conclude,
    load,
    options_of,
    parser,
    start,
    surroundings,
    table,
)

from keras_dist import _gpu

SHAPE = (25_000_000 // 4,)  # 25 MB; four of them are reduced
ARRAYS = 4
PART_SECONDS = 100
MODELS = {"mlp": 20, "cnn": 20, "resnet50": 3}  # and their numbers of steps
NO_GPU = 3  # exit code


def main():
    made = parser(__doc__, "fewer steps, and no ResNet-50")
    made.add_argument("--backends", nargs="+", default=["torch", "jax"])
    options = options_of(made, work)
    gpus = visible_gpus()
    if not gpus:
        print("no GPU here (or no CUDA runtime): nothing was measured")
        sys.exit(NO_GPU)
    before, shared = load(), len(gpus) < 2
    rows, failures = [], {}

    def part(title, ranks, backend, **task):
        """Returns the findings of a part; `None` if it fails."""
        variables = {"KERAS_BACKEND": backend, "KERAS_DIST_STALL_ABORT_SECONDS": "60"}
        variables["KERAS_DIST_GPU"] = task.pop("path", "nccl")
        if shared:
            variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}
        try:
            return start(__file__, ranks, task, PART_SECONDS, **variables)
        except (subprocess.SubprocessError, OSError) as error:
            failures[title] = f"{type(error).__name__} {getattr(error, 'returncode', '')}".strip()
            return None

    for backend in options.backends:
        for model, steps in MODELS.items():
            if options.quick and model == "resnet50":
                continue
            title = f"replicas of {model} are equal to the bit, {backend}"
            found = part(title, 2, backend, part="replicas", model=model, steps=steps)
            rows.append((title, "equal", describe(found, failures, title), bool(found)))
    rows += reductions(part, failures)
    if not options.quick:
        rows += resnet(part, failures)
    text = [
        "# Reductions in GPU memory",
        surroundings(before),
        f"{'Two ranks share one' if shared else 'Each rank has its'} GPU: {gpus[0]}; {versions()}.",
    ]
    conclude(options.output, "gpu", text, rows)


def describe(found, failures, title):
    return f"equal, {found['path']}" if found else failures[title]


def reductions(part, failures):
    """Measures 100 MB on each path; returns rows of what must be reached."""
    times, copies = {}, {}
    for way, path in (("nccl", "nccl"), ("pinned", "host"), ("today", "host")):
        title = f"100 MB, {way}"
        found = part(title, 2, "torch", part="reduction", way=way, path=path)
        if found:
            times[way], copies[way] = statistics.median(found["ms"]), found["host_copies"]
    print(table(["path of 100 MB", "ms"], [(way, f"{ms:.2f}") for way, ms in times.items()]))
    if set(times) != {"nccl", "pinned", "today"}:
        return [("100 MB are reduced on each path", "all", str(failures), False)]
    faster, pinned = times["today"] / times["nccl"], times["today"] / times["pinned"]
    return [
        ("copies to or from the host, NCCL", "0", str(copies["nccl"]), copies["nccl"] == 0),
        ("NCCL against numpy on the host", "10 x", f"{faster:.1f} x", faster >= 10),
        ("two pinned halves against the same", "1 x", f"{pinned:.2f} x", pinned >= 1),
    ]


def resnet(part, failures):
    """Measures one rank of ResNet-50 with and without keras_dist; returns rows."""
    title = "ResNet-50, batch 128, bfloat16"
    found = part(title, 1, "torch", part="resnet", path="auto")
    if not found:
        return [(title, "2 %", failures[title], False)]
    share = statistics.median(found["wrapped"]) / statistics.median(found["plain"]) - 1
    return [(f"{title}: one rank against plain Keras", "2 %", f"{share:+.1%}", share <= 0.02)]


def visible_gpus():
    """Returns the PCI bus ids of the GPUs; none over the test double, which measures nothing."""
    runtime = None if _gpu.counts_host_memory() else _gpu.load_runtime()
    return [] if runtime is None else [runtime.bus_id(n) for n in range(runtime.count())]


def versions():
    from importlib import metadata

    nccl = _gpu.load_nccl()
    names = ("torch", "jax", "keras")
    parts = [f"{name} {metadata.version(name)}" for name in names if has(name)]
    found = nccl if isinstance(nccl, str) else f"NCCL {_gpu.version_text(nccl.version())}"
    return ", ".join([found, *parts])


def has(name):
    from importlib import metadata

    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


# --- On the ranks


def work(path):
    import keras_dist

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    found = {"replicas": replicas, "reduction": reduction, "resnet": resnet_times}[task["part"]](
        task
    )
    if keras_dist.rank() == 0:
        answer(path, found)


def replicas(task):
    import keras

    import keras_dist
    from keras_dist import _engine, runtime

    model, x, y = model_and_data(task["model"], 8 * task["steps"])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    return {"path": str(_engine.path_of(runtime.communicator()))}


def model_and_data(name, samples):
    """Returns a model and random data, which differ between the ranks."""
    import keras

    import keras_dist

    random = np.random.default_rng(keras_dist.rank())
    side, channels, classes = (224, 3, 1000) if name == "resnet50" else (28, 1, 10)
    x = random.normal(size=(samples, side, side, channels)).astype("float32")
    y = random.integers(0, classes, samples)
    keras.utils.set_random_seed(0)
    if name == "resnet50":
        return keras.applications.ResNet50(weights=None), x, y
    hidden = [keras.layers.Flatten()] + [keras.layers.Dense(2048, "relu") for _ in range(3)]
    if name == "cnn":
        hidden = [keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.MaxPooling2D()]
        hidden += [keras.layers.Flatten()]
    layers = [keras.Input((side, side, channels)), *hidden, keras.layers.Dense(classes, "softmax")]
    return keras.Sequential(layers), x, y


def reduction(task):
    import torch

    from keras_dist import _engine, runtime
    from keras_dist._backends.torch_device import to_array, to_tensor
    from keras_dist._backends.torch_tensors import to_numpy, to_torch

    comm = runtime.communicator()
    tensors = [torch.ones(SHAPE, device="cuda") for _ in range(ARRAYS)]
    specs = [(SHAPE, np.dtype("float32"))] * ARRAYS
    plan = _engine.PlanOptions(2**24, lend=True)
    names = [str(index) for index in range(ARRAYS)]
    fused = _engine.FusedAllreduce(comm, names, specs, _engine.OpOptions(), plan)
    take, give = (to_numpy, to_torch) if task["way"] == "today" else (to_array, to_tensor)

    def call():
        results = fused([take(tensor) for tensor in tensors])
        return [give(result, like) for result, like in zip(results, tensors, strict=True)]

    times = []
    for _ in range(13):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        results = call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    if not all((result == 1).all() for result in results):
        raise SystemExit("a reduction has a wrong result")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name or "Memcpy HtoD" in e.name]
    return {"ms": times[3:], "host_copies": len(copies)}


def resnet_times(task):
    import keras

    import keras_dist

    keras.config.set_dtype_policy("mixed_bfloat16")
    times = {"plain": [], "wrapped": []}
    models = {}
    for way in times:
        model, x, y = model_and_data("resnet50", 128)
        optimizer = keras.optimizers.SGD(0.01)
        if way == "wrapped":
            optimizer = keras_dist.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss="sparse_categorical_crossentropy")
        model.train_on_batch(x, y)
        models[way] = model
    for _ in range(7):  # in turn, so that both meet the same clocks
        for way, model in models.items():
            begin = time.perf_counter()
            for _ in range(3):
                model.train_on_batch(x, y)
            times[way].append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
