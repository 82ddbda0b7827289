"""The parts of the proof on GPUs, as its ranks run them. See `gpu`."""

import os
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from gpu_models import device, synchronize
from gpu_report import report, yes
from gpu_speed import calls, fit, log, loop, one_rank

__all__ = ["PARTS"]


def versions(out):
    import torch

    import keras_dist
    from keras_dist import _gpu

    keras_dist.init()
    nccl = _gpu.load_nccl()
    found = nccl if isinstance(nccl, str) else f"NCCL {_gpu.version_text(nccl.version())}"
    names = ("keras", "torch", "jax", "tensorflow", "mpi4py", "numpy")
    known = []
    for name in names:
        try:
            known.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    report(out, lines=[f"{time.strftime('%Y-%m-%d')}: {gpu}; {found}, {', '.join(known)}."])


# --- Values


def values(out):
    from gpu_values import differences, uneven

    import keras_dist

    keras_dist.init()
    compare(out, [*differences(), *uneven()])


def rare_values(out):
    from gpu_values import of_different_lengths, rare

    import keras_dist

    keras_dist.init()
    lines = [
        "Rarer values differ: a build of NCCL may lack their kernels, and then leaves the result",
        "as it was, without an error. Compare with a complete build.",
    ]
    compare(out, [*rare(), *of_different_lengths()], may_be_absent=True, lines=lines)


def compare(out, comparisons, may_be_absent=False, lines=()):
    """Reports comparisons; those of kernels that a library may lack are no fault."""
    rows, told_of_all = [], []
    for title, found, count in comparisons:
        told = f"{count} equal" if not found else f"{len(found)} of {count} differ: {found[0]}"
        bound = "those of the host" + (", if NCCL has them" if may_be_absent else "")
        rows.append((title, bound, told, "" if found and may_be_absent else yes(not found)))
        told_of_all += lines if found and not told_of_all else ()
    report(out, rows, told_of_all)


OPTIMIZERS = {
    "SGD": lambda keras: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda keras: keras.optimizers.Adam(1e-3),
    "AdamW, clipped, two passes": lambda keras: keras.optimizers.AdamW(
        1e-3, global_clipnorm=0.5, gradient_accumulation_steps=2
    ),
}


def train(rows, wraps):
    """Yields optimizer, TF32, model and history of trainings on some rows."""
    import keras

    import keras_dist

    backend = keras.backend.backend()
    batch = len(rows) // 8
    for tf32 in (False, True) if backend == "torch" and device() != "cpu" else (False,):
        if backend == "torch":
            import torch

            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
        else:
            import jax

            jax.config.update("jax_default_matmul_precision", "highest")
        for name, make in OPTIMIZERS.items():
            keras.utils.set_random_seed(1)
            layers = keras.layers
            model = keras.Sequential(
                [
                    keras.Input((16, 16, 3)),
                    layers.Conv2D(8, 3, activation="relu"),
                    layers.Flatten(),
                    layers.Dense(32, "relu"),
                    layers.Dense(10),
                ]
            )
            optimizer = make(keras)
            model.compile(
                keras_dist.DistributedOptimizer(optimizer) if wraps else optimizer,
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            random = np.random.default_rng(0)
            x = random.normal(size=(256, 16, 16, 3)).astype("f4")[rows]
            y = random.integers(0, 10, 256)[rows]
            callbacks = keras_dist.callbacks() if wraps else None
            model.fit(
                x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
            )
            yield name, tf32, model


def alone(out):
    import keras_dist

    keras_dist.init()
    for name, tf32, model in train(np.arange(256), False):
        np.savez(reference(name, tf32), *model.get_weights())
    report(out)


def equality(out):
    import keras

    import keras_dist

    keras_dist.init()
    backend, size, rank = keras.backend.backend(), keras_dist.size(), keras_dist.rank()
    mine = np.arange(256).reshape(8, size, -1)[:, rank].reshape(-1)
    rows = []
    for name, tf32, model in train(mine, True):
        keras_dist.verify_replicas(model)
        expected = np.load(reference(name, tf32))
        weights = zip(model.get_weights(), expected.values(), strict=True)
        difference = np.concatenate([(ours - theirs).reshape(-1) for ours, theirs in weights])
        mean = float(np.sqrt(np.square(difference).mean()))
        told = f"{mean:.1e} in the mean, {np.abs(difference).max():.1e} at most"
        bound = 2e-3 if tf32 else 2e-4
        title = f"weights beside one process, {backend}, {name}{', TF32' if tf32 else ''}"
        rows.append((title, f"{bound:g} in the mean", told, yes(mean <= bound)))
    report(out, rows)


def reference(name, tf32):
    import keras

    folder = Path(os.environ["GPU_PROOF_FOLDER"])
    return folder / f"{keras.backend.backend()}-{name.split(',')[0]}-{tf32}.npz"


# --- Faults


def no_memory(out):
    """An allocation fails on one rank: all raise it, and continue."""
    import torch

    import keras_dist.torch as hvd
    from keras_dist import _gpu, errors

    hvd.init()
    x = torch.ones(1000, device=device())
    hvd.allreduce(x, op=hvd.Sum)
    began, told = time.perf_counter(), "no error"
    empty, prepare = _gpu.DeviceArray.empty, _gpu.DeviceArray.prepare

    def fail(*_):
        torch.empty(2**50, device=device())

    if hvd.rank() == 1:
        _gpu.DeviceArray.empty = fail
    try:
        hvd.allreduce(x, op=hvd.Sum)
    except errors.RankError as error:
        told = str(error)
    finally:
        _gpu.DeviceArray.empty, _gpu.DeviceArray.prepare = empty, prepare
    seconds = time.perf_counter() - began
    everyone = hvd.allgather_object(told)
    after = hvd.allreduce(x, op=hvd.Sum)
    goes_on = bool((after == hvd.size()).all())
    same = len(set(everyone)) == 1 and "rank 1 of" in everyone[0] and goes_on
    what = (
        f"the same error on all in {seconds:.1f} s, and they go on" if same else str(everyone)[:90]
    )
    title = "an allocation fails on one rank"
    report(out, [(title, "an error on all ranks", what, yes(same))])


def killed(out):
    """Rank 1 dies while rank 0 waits on the GPU for it."""
    import signal

    import torch

    import keras_dist.torch as hvd
    from keras_dist import _gpu

    hvd.init()
    x = torch.ones(1_000_000, device=device())
    for _ in range(3):
        hvd.allreduce(x, op=hvd.Sum)
    synchronize()
    if hvd.rank() == 1:

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        _gpu.Nccl.allreduce = die
    result = hvd.allreduce(x, op=hvd.Sum)
    result.sum().item()
    raise SystemExit("the reduction has ended without a rank")


PARTS = {
    function.__name__: function
    for function in (
        versions,
        loop,
        fit,
        one_rank,
        calls,
        log,
        values,
        rare_values,
        alone,
        equality,
        no_memory,
        killed,
    )
}
