"""The parts of the proof on GPUs that measure speed, as its ranks run them. See `gpu`."""

import copy
import cProfile
import hashlib
import os
import pstats
import time
from pathlib import Path

import numpy as np
from gpu_models import (
    ResNet50,
    data,
    device,
    keras_model,
    small,
    synchronize,
    time_in_turn,
)
from gpu_report import report, yes

__all__ = ["calls", "fit", "log", "loop", "one_rank"]

MIB = 2**20


def loop(out):
    """Steps of torch: keras_dist, DDP, and no communication, in turn; what a step consists of."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "LOCAL_RANK": "0"}
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), **address)
    import torch
    import torch.distributed as peers
    from torch.nn.parallel import DistributedDataParallel

    import keras_dist.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    base, batch, side, classes, steps = ResNet50()
    place = device()
    x = torch.randn(batch, 3, side, side, device=place)
    y = torch.randint(0, classes, (batch,), device=place)
    nets = {way: copy.deepcopy(base).to(place) for way in ("keras_dist", "none")}
    hvd.broadcast_parameters(nets["keras_dist"].state_dict(), root_rank=0)
    optimizers = {way: torch.optim.SGD(net.parameters(), 0.01) for way, net in nets.items()}
    optimizers["keras_dist"] = hvd.DistributedOptimizer(
        optimizers["keras_dist"], nets["keras_dist"].named_parameters()
    )
    lines = []
    try:
        peers.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
        nets["DDP"] = DistributedDataParallel(copy.deepcopy(base).to(place), device_ids=ids)
        optimizers["DDP"] = torch.optim.SGD(nets["DDP"].parameters(), 0.01)
    except Exception as error:
        lines.append(f"DDP: {type(error).__name__}: {str(error)[:200]}")

    def step(way):
        optimizers[way].zero_grad()
        with torch.autocast(place, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(nets[way](x), y)
        loss.backward()
        optimizers[way].step()

    for way in nets:
        for _ in range(3):
            step(way)

    def several(way):
        for _ in range(steps):
            step(way)

    times = time_in_turn(nets, several, 2 if small() else 5, world, steps)
    lines += breakdown(lambda: step("keras_dist"), steps)
    weights = [p.detach().float().flatten() for p in nets["keras_dist"].parameters()]
    digest = hashlib.sha256(torch.cat(weights).cpu().numpy().tobytes()).hexdigest()
    rows = [
        (f"{type(base).__name__}, torch loop, {way}", "", f"{ms:.1f} ms a step", "")
        for way, ms in times.items()
    ]
    if "DDP" in times:
        share = times["keras_dist"] / times["DDP"]
        ok = yes(share <= 1.0) if not small() else ""
        rows.append(("keras_dist beside DDP", "1.0 x", f"{share:.2f} x", ok))
    same = len(set(world.allgather(digest))) == 1
    rows.append(
        ("replicas after the torch loop", "equal", "equal" if same else "differ", yes(same))
    )
    report(out, rows, lines)
    if peers.is_initialized():
        peers.destroy_process_group()


def breakdown(step, steps):
    """Returns lines with the host's time in a step, by function of keras_dist."""
    from keras_dist import _gpu
    from keras_dist._backends import torch_tensors
    from keras_dist._engine.collectives import device_buckets, nccl_launch
    from keras_dist._engine.nccl import launches, ranks
    from keras_dist._engine.ordering import ticket
    from keras_dist.torch import gradients

    found = {}

    def timed(owner, name, title):
        function = getattr(owner, name)

        def run(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total, count = found.get(title, (0.0, 0))
                found[title] = total + time.perf_counter() - begin, count + 1

        setattr(owner, name, run)
        return owner, name, function

    patched = [
        timed(gradients.Gradients, "_add", "hooks of gradients"),
        timed(gradients.Gradients, "reduce", "the reduction in step"),
        timed(device_buckets.JoinedArrays, "_join", "joining the arrays of buckets"),
        timed(device_buckets, "rendezvous", "meeting before the first launch"),
        timed(nccl_launch, "rendezvous", "meeting after the last launch"),
        timed(ranks.NcclRanks, "launch", "launches"),
        timed(_gpu.Nccl, "end", "ncclGroupEnd"),
        timed(ranks.NcclRanks, "_settle", "waiting until NCCL has launched"),
        timed(ticket.Handle, "wait", "waiting for queued buckets"),
        timed(launches.Launch, "wait", "the host waiting for the GPU"),
        timed(gradients, "write_all", "writing the gradients"),
        timed(torch_tensors, "_device_array", "making arrays"),
        timed(torch_tensors, "copy_all", "copies by the framework"),
    ]
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    host = time.perf_counter() - begin
    synchronize()
    whole = time.perf_counter() - begin
    for owner, name, function in patched:
        setattr(owner, name, function)
    lines = [f"a step on the host {1e3 * host / steps:.2f} ms, whole {1e3 * whole / steps:.2f} ms:"]
    for title, (seconds, count) in sorted(found.items(), key=lambda item: -item[1][0]):
        lines.append(
            f"  {title}: {1e3 * seconds / steps:.2f} ms in {count / steps:.0f} calls a step"
        )
    return lines


def fit(out):
    """fit beside plain fit in the same process, in turn."""
    import keras
    from mpi4py import MPI

    import keras_dist

    keras_dist.init()
    backend, steps = keras.backend.backend(), 3 if small() else 24
    x, y, batch = data(steps)
    models = {"plain": keras_model(False), "keras_dist": keras_model(True)}

    def run(way):
        callbacks = keras_dist.callbacks() if way == "keras_dist" else None
        models[way].fit(x, y, batch_size=batch, verbose=0, callbacks=callbacks)

    for way in models:
        run(way)
    times = time_in_turn(models, run, 2 if small() else 5, MPI.COMM_WORLD, steps)
    rows = [(f"fit, {backend}, {way}", "", f"{ms:.2f} ms a step", "") for way, ms in times.items()]
    bound = {"jax": 14, "torch": 37}[backend]
    ok = "" if small() else yes(times["keras_dist"] <= bound)
    rows.append((f"fit, {backend}", f"{bound} ms", f"{times['keras_dist']:.2f} ms a step", ok))
    keras_dist.verify_replicas(models["keras_dist"])
    rows.append((f"replicas after fit, {backend}", "equal", "equal", "yes"))
    report(out, rows, profile(lambda: run("keras_dist"), steps))


def profile(work, steps):
    """Returns lines with the functions in which the main thread spends most time."""
    found = cProfile.Profile()
    found.runcall(work)
    times = pstats.Stats(found).stats
    longest = sorted(times.items(), key=lambda item: -item[1][2])[:14]
    lines = ["functions in which the main thread of keras_dist is longest:"]
    for (path, line, name), (_, count, own, whole, _) in longest:
        place = f"{Path(path).name}:{line} {name}" if line else name
        each = f"{1e3 * own / steps:.2f} ms a step, with calls {1e3 * whole / steps:.2f}"
        lines.append(f"  {place}: {each}, {count / steps:.1f} calls")
    return lines


def one_rank(out):
    """fit of one rank beside plain fit, with and without the callbacks."""
    import keras
    from mpi4py import MPI

    import keras_dist

    keras_dist.init()
    backend, steps = keras.backend.backend(), 3 if small() else 48
    x, y, batch = data(steps)
    models = {"plain": keras_model(False), "keras_dist": keras_model(True)}
    models["with callbacks"] = models["keras_dist"]
    models["plain again"] = models["plain"]

    def run(way):
        callbacks = keras_dist.callbacks() if way == "with callbacks" else None
        models[way].fit(x, y, batch_size=batch, verbose=0, callbacks=callbacks)

    for way in models:
        run(way)
    times = time_in_turn(models, run, 2 if small() else 7, MPI.COMM_WORLD, steps)
    rows, noise = [], abs(1 - times["plain"] / times["plain again"])
    bound = min(0.99, 1 - noise)  # plain Keras differs from itself by as much
    for way in ("plain again", "keras_dist", "with callbacks"):
        share = times["plain"] / times[way]
        ok = "" if small() or way == "plain again" else yes(share >= bound)
        measured = f"{share:.3f} ({times[way]:.2f} ms a step)"
        rows.append((f"one rank of plain Keras, {backend}, {way}", f"{bound:.3f}", measured, ok))
    report(out, rows, memory_held(models["keras_dist"], x, y, batch))


def memory_held(model, x, y, batch):
    """Returns a line with the GPU memory that the callbacks hold after a fit of torch."""
    import keras

    import keras_dist

    if keras.backend.backend() != "torch" or device() == "cpu":
        return []
    import torch

    held = []
    for callbacks in (None, keras_dist.callbacks()):
        model.fit(x[:batch], y[:batch], batch_size=batch, verbose=0, callbacks=callbacks)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    return [f"callbacks hold {(held[1] - held[0]) / MIB:.2f} MiB of GPU memory after a fit"]


def calls(out):
    """Public calls beside those of torch.distributed on the same tensors, in turn."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514", "LOCAL_RANK": "0"}
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), **address)
    import torch
    import torch.distributed as peers

    import keras_dist.torch as hvd

    hvd.init()
    peers.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rows = []
    for count in (2**10, 2**18, 2**22 if small() else 25_000_000):
        ours, theirs = (torch.ones(count, device=device()) for _ in range(2))
        ways = {
            "keras_dist": lambda ours=ours, name=f"x{count}": hvd.allreduce(
                ours, op=hvd.Sum, name=name
            ),
            "torch.distributed": lambda theirs=theirs: peers.all_reduce(theirs),
        }
        for call in ways.values():
            call()
        times = time_in_turn(
            ways, lambda way, ways=ways: ways[way](), 5 if small() else 20, world, 1
        )
        share = times["keras_dist"] / times["torch.distributed"]
        ok = "" if small() else yes(share <= 1.05)
        told = f"{times['keras_dist']:.3f} ms, {share:.2f} x torch.distributed"
        rows.append((f"allreduce of {4 * count / MIB:.3g} MiB", "1.05 x", told, ok))
    report(out, rows)
    peers.destroy_process_group()


def log(out):
    """Counts NCCL's operations in a step of torch, by its log."""
    import torch

    import keras_dist.torch as hvd
    from keras_dist import _gpu

    hvd.init()
    base, batch, side, classes, _ = ResNet50()
    net = base.to(device())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    x = torch.randn(min(batch, 8), 3, side, side, device=device())
    y = torch.randint(0, classes, (len(x),), device=device())
    made, allreduce = [], _gpu.Nccl.allreduce
    _gpu.Nccl.allreduce = lambda *args: (made.append(args), allreduce(*args))[1]

    def count():
        folder = Path(os.environ["GPU_PROOF_FOLDER"])
        texts = [path.read_text(errors="replace") for path in folder.glob(f"nccl.{os.getpid()}")]
        logged = sum(text.count("AllReduce:") for text in texts)
        return np.array([len(made), logged])

    before, steps = None, 4
    for step in range(2 + steps):
        if step == 2:
            synchronize()
            before = count()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    synchronize()
    ours, logged = (count() - before) / steps
    nbytes = sum(p.numel() * p.element_size() for p in net.parameters())
    bound = -(-nbytes // (25 * MIB)) + 1
    what = f"operations of NCCL in a step of {nbytes / MIB:.0f} MiB"
    told = f"{ours:.3g}, in its log {logged:.3g}"
    report(out, [(what, str(bound), told, yes(max(ours, logged) <= bound))])
