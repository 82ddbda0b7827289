"""Reductions in GPU memory: equal replicas, 100 MB by NCCL and through the host, and ResNet-50.

Two ranks use two GPUs, or share one, which NCCL supports from version 2.30 on. Without a GPU
nothing is measured. Every part is a job with a time limit. `--dry-run` runs every part on the CPU
with small models over the tests' double of NCCL, which shows that the parts run and no more.
"""

import gc
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
BACKENDS = ("torch", "jax", "tensorflow")
HELD_NBYTES = 2**20  # bound of the GPU memory that callbacks hold
DOUBLE = Path(__file__).parents[1] / "tests" / "gpu_double.py"
NO_GPU = 3  # exit code


def main():
    made = parser(__doc__, "fewer steps, and no ResNet-50")
    made.add_argument("--backends", nargs="+", help="default: torch, jax, tensorflow with CUDA")
    made.add_argument("--dry-run", action="store_true", help="on the CPU; measures nothing")
    options = options_of(made, work)
    dry = options.dry_run
    gpus = ["a double of the tests"] * 2 if dry else visible_gpus()
    if not gpus:
        print("no GPU here (or no CUDA runtime): nothing was measured")
        sys.exit(NO_GPU)
    before, shared = load(), len(gpus) < 2
    backends = options.backends or [name for name in BACKENDS if is_usable(name, dry)]
    rows, failures = [], {}

    def part(title, ranks, backend, **task):
        """Returns the findings of a part; `None` if it fails."""
        try:
            variables = variables_of(backend, shared, dry) | {
                "KERAS_DIST_GPU": task.pop("path", "nccl")
            }
            return start(__file__, ranks, task | {"dry": dry}, PART_SECONDS, **variables)
        except (subprocess.SubprocessError, OSError) as error:
            failures[title] = f"{type(error).__name__} {getattr(error, 'returncode', '')}".strip()
            return None

    for backend in backends:
        for model, steps in MODELS.items():
            if options.quick and model == "resnet50":
                continue
            title = f"replicas of {model} are equal to the bit, {backend}"
            found = part(title, 2, backend, part="replicas", model=model, steps=steps)
            rows.append((title, "equal", describe(found, failures, title), bool(found)))
        rows.append(memory(part, failures, backend))
    rows += reductions(part, failures, dry)
    if not options.quick:
        rows += [resnet(part, failures, name) for name in backends if name != "tensorflow"]
    if dry:
        end_dry_run(rows, failures)
    text = [
        "# Reductions in GPU memory",
        surroundings(before),
        f"{'Two ranks share one' if shared else 'Each rank has its'} GPU: {gpus[0]}; {versions()}.",
    ]
    conclude(options.output, "gpu", text, rows)


def variables_of(backend, shared, dry):
    """Returns the environment variables of a part."""
    variables = {"KERAS_BACKEND": backend, "KERAS_DIST_STALL_ABORT_SECONDS": "60"}
    if dry:
        variables |= {"_KERAS_DIST_GPU_DOUBLE": str(DOUBLE), "CUDA_VISIBLE_DEVICES": ""}
    elif shared:
        variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}
    return variables


def end_dry_run(rows, failures):
    """Says which parts have run, without numbers, and ends."""
    for title, _, _, _ in rows:
        print(f"ran: {title}" if not failures else title)
    for title, failure in failures.items():
        print(f"failed: {title}: {failure}")
    print(f"dry run: {len(failures)} failures in parts; nothing was measured")
    sys.exit(1 if failures else 0)


def is_usable(backend, dry):
    """Returns whether a backend is installed; TensorFlow counts where it has a GPU build."""
    if backend != "tensorflow" or dry:
        return has(backend)
    if not (has("tensorflow") or has("tensorflow-cpu")):
        return False
    code = "import tensorflow as tf; raise SystemExit(not tf.test.is_built_with_cuda())"
    return subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL).returncode == 0


def describe(found, failures, title):
    return f"equal, {found['path']}" if found else failures[title]


def reductions(part, failures, dry):
    """Measures 100 MB on each path; returns rows of what must be reached."""
    times, copies = {}, {}
    for way, path in (("nccl", "nccl"), ("pinned", "host"), ("today", "host")):
        title = f"100 MB, {way}"
        found = part(title, 2, "torch", part="reduction", way=way, path=path)
        if found:
            times[way], copies[way] = statistics.median(found["ms"]), found["host_copies"]
    if not dry:
        print(table(["path of 100 MB", "ms"], [(way, f"{ms:.2f}") for way, ms in times.items()]))
    if set(times) != {"nccl", "pinned", "today"}:
        return [("100 MB are reduced on each path", "all", str(failures), False)]
    faster, pinned = times["today"] / times["nccl"], times["today"] / times["pinned"]
    return [
        ("copies to or from the host, NCCL", "0", str(copies["nccl"]), copies["nccl"] == 0),
        ("NCCL against numpy on the host", "10 x", f"{faster:.1f} x", faster >= 10),
        ("two pinned halves against the same", "1 x", f"{pinned:.2f} x", pinned >= 1),
    ]


def memory(part, failures, backend):
    """Measures the GPU memory that callbacks hold after `fit`; returns a row."""
    title = f"GPU memory that keras_dist.callbacks() holds, CNN, {backend}"
    found = part(title, 2, backend, part="memory", model="cnn", steps=MODELS["cnn"])
    bound = f"{HELD_NBYTES >> 20} MiB"
    if not found:
        return title, bound, failures[title], False
    held = found["with"] - found["without"]
    return title, bound, f"{held / 2**20:.1f} MiB", held <= HELD_NBYTES


def resnet(part, failures, backend):
    """Measures one rank of ResNet-50 with and without keras_dist; returns a row."""
    title = f"ResNet-50, batch 128, bfloat16, {backend}: one rank against plain Keras"
    found = part(title, 1, backend, part="resnet", path="auto")
    if not found:
        return title, "2 %", failures[title], False
    share = statistics.median(found["wrapped"]) / statistics.median(found["plain"]) - 1
    return title, "2 %", f"{share:+.1%}", share <= 0.02


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
    parts = {"replicas": replicas, "reduction": reduction, "resnet": resnet_times}
    found = (parts | {"memory": memory_held})[task["part"]](task)
    if keras_dist.rank() == 0:
        answer(path, found)


def replicas(task):
    import keras

    import keras_dist
    from keras_dist import _engine, runtime

    model, x, y = model_and_data(task["model"], 8 * task["steps"], task["dry"])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=keras_dist.callbacks())
    keras_dist.verify_replicas(model)
    return {"path": str(_engine.path_of(runtime.communicator()))}


def memory_held(task):
    import keras

    import keras_dist

    found = {}
    model, x, y = model_and_data(task["model"], 8 * task["steps"], task["dry"])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.001))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=8, verbose=0)  # allocates what training needs
    for way, callbacks in (("without", None), ("with", keras_dist.callbacks())):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        gc.collect()
        found[way] = 0 if task["dry"] else allocated()
    return found


def allocated():
    """Returns the bytes of GPU memory that arrays of the backend take."""
    import keras

    if keras.backend.backend() == "torch":
        import torch

        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    if keras.backend.backend() == "jax":
        import jax

        return jax.local_devices()[0].memory_stats()["bytes_in_use"]
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("GPU:0")["current"]


def model_and_data(name, samples, dry=False):
    """Returns a model and random data, which differ between the ranks."""
    import keras

    import keras_dist

    random = np.random.default_rng(keras_dist.rank())
    if dry:
        samples = min(samples, 16)
        name = "cnn" if name == "resnet50" else name
    side, channels, classes = (224, 3, 1000) if name == "resnet50" else (28, 1, 10)
    x = random.normal(size=(samples, side, side, channels)).astype("float32")
    y = random.integers(0, classes, samples)
    keras.utils.set_random_seed(0)
    if name == "resnet50":
        return keras.applications.ResNet50(weights=None), x, y
    width = 16 if dry else 2048
    hidden = [keras.layers.Flatten()] + [keras.layers.Dense(width, "relu") for _ in range(3)]
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

    comm, dry = runtime.communicator(), task["dry"]
    shape, device = ((1000,), "cpu") if dry else (SHAPE, "cuda")
    synchronize = torch.cpu.synchronize if dry else torch.cuda.synchronize
    tensors = [torch.ones(shape, device=device) for _ in range(ARRAYS)]
    specs = [(shape, np.dtype("float32"))] * ARRAYS
    plan = _engine.PlanOptions(2**24, lend=True)
    names = [str(index) for index in range(ARRAYS)]
    fused = _engine.FusedAllreduce(comm, names, specs, _engine.OpOptions(), plan)
    take, give = (to_numpy, to_torch) if task["way"] == "today" else (to_array, to_tensor)

    def call():
        results = fused([take(tensor) for tensor in tensors])
        return [give(result, like) for result, like in zip(results, tensors, strict=True)]

    times = []
    for _ in range(13):
        synchronize()
        begin = time.perf_counter()
        results = call()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    if not all((result == 1).all() for result in results):
        raise SystemExit("a reduction has a wrong result")
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU if dry else activity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        synchronize()
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name or "Memcpy HtoD" in e.name]
    return {"ms": times[3:], "host_copies": len(copies)}


def resnet_times(task):
    import keras

    import keras_dist

    keras.config.set_dtype_policy("mixed_bfloat16")
    times = {"plain": [], "wrapped": []}
    models = {}
    for way in times:
        model, x, y = model_and_data("resnet50", 128, task["dry"])
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
