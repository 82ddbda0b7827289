"""Values of reductions in GPU memory beside those of the host, for the proof on GPUs."""

import numpy as np
from gpu_models import device


def text_of(tensor):
    import torch

    tensor = tensor.cpu()
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return str((tensor.double() if narrow else tensor).tolist())


def compared(title, cases):
    """Returns a title, the cases whose values differ from the host's, and their number."""
    import torch

    import keras_dist
    import keras_dist.torch as hvd

    found = []
    for name, op, dtype, rows in cases:
        mine = torch.tensor(rows[keras_dist.rank() % len(rows)], dtype=dtype)
        told = []
        for place in (device(), "cpu"):
            key = f"{name} {dtype} {place} {len(told)}"
            try:
                told.append(text_of(hvd.allreduce(mine.to(place), op=op, name=key)))
            except Exception as error:
                told.append(f"{type(error).__name__}: {str(error)[:60]}")
        everyone = keras_dist.allgather_object(told)
        if any(theirs != [everyone[0][1]] * 2 for theirs in everyone):
            found.append(f"{name} {dtype}: {everyone}"[:120])
    return title, found, len(cases)


def differences():
    """Yields comparisons of reductions: of the usual dtypes, and of odd values."""
    import torch

    import keras_dist.torch as hvd

    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    whole = (torch.int32, torch.int64, torch.uint8)
    cases = [("sum", hvd.Sum, dtype, rows()) for dtype in (*floats, *whole)]
    cases += [("average", hvd.Average, dtype, rows()) for dtype in floats]
    cases += orders((torch.float32, torch.int64, torch.uint8))
    yield compared("reductions of every dtype", cases)
    inf = float("inf")
    cases = [
        ("infinities", hvd.Sum, torch.float32, [[inf, 1.0], [-inf, 2.0]]),
        ("subnormal numbers", hvd.Sum, torch.float32, [[1e-40, 3e-45], [1e-40, 3e-45]]),
        ("subnormal numbers", hvd.Sum, torch.float16, [[6e-8, 1e-6], [6e-8, 1e-6]]),
        ("overflow", hvd.Sum, torch.float16, [[60000.0, 1.0], [60000.0, 1.0]]),
        ("average", hvd.Average, torch.int32, [[3, -3, 7], [4, -4, 8]]),
        ("complex", hvd.Sum, torch.complex64, [[1 + 2j], [3 - 1j]]),
    ]
    yield compared("infinities, subnormal and complex numbers, overflow", cases)


def rare():
    """Yields comparisons of what a library may be built without, or define in another way."""
    import torch

    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int32)
    yield compared("minima, maxima and products of rarer dtypes", orders(dtypes))
    # NCCL keeps the number, the host the NaN.
    yield compared("NaN in min and max", orders((torch.float32, *dtypes[1:3]), ODD))


NAN = float("nan")
ODD = [[NAN, 1.0, NAN], [1.0, NAN, NAN]]


def orders(dtypes, values=None):
    """Returns cases of minima and maxima, and of products of usual values."""
    import keras_dist.torch as hvd

    ops = {"min": hvd.Min, "max": hvd.Max} | ({} if values else {"product": hvd.Product})
    return [(name, op, dtype, values or rows()) for name, op in ops.items() for dtype in dtypes]


def rows():
    """Returns small numbers of each rank."""
    return np.random.default_rng(0).integers(0, 4, (4, 100)).tolist()


def uneven():
    """Yields comparisons of operations other than reductions of one tensor."""
    import torch

    import keras_dist
    import keras_dist.torch as hvd

    rank, size = keras_dist.rank(), keras_dist.size()
    sent = torch.full((2, 3), float(rank + 1))
    scattered = torch.arange(2.0 * (2 * size + 1)).reshape(-1, 2) + rank
    several = [torch.full((n, n + 1), float(rank + n)) for n in (1, 2, 3)]
    works = {
        "broadcast": lambda to, name: [hvd.broadcast(to(sent), size - 1, name)],
        "reducescatter": lambda to, name: [hvd.reducescatter(to(scattered), name, op=hvd.Sum)],
        "grouped_allreduce": lambda to, name: hvd.grouped_allreduce(
            [to(each) for each in several], name=name, op=hvd.Sum
        ),
    }
    for title, work in works.items():
        yield beside_the_host(title, work)


def of_different_lengths():
    """Yields a comparison of allgather, for which NCCL 2.29 and newer have a kernel of its own."""
    import torch

    import keras_dist
    import keras_dist.torch as hvd

    rank = keras_dist.rank()
    mine = torch.full((rank + 2, 3), float(rank + 1))
    yield beside_the_host(
        "allgather of different lengths", lambda to, name: [hvd.allgather(to(mine), name)]
    )


def beside_the_host(title, work):
    """Returns a title, the results on the GPU that differ from the host's, and their number.

    Args:
        title: the title.
        work: makes the results of a function that moves a tensor, and of a name.
    """
    import keras_dist

    here, host = (
        work(lambda tensor, place=place: tensor.to(place), f"{title} {number}")
        for number, place in enumerate((device(), "cpu"))
    )
    pairs = [(text_of(a), text_of(b)) for a, b in zip(here, host, strict=True)]
    everyone = keras_dist.allgather_object(pairs)
    found = [
        f"rank {rank}: {here}, host {host}"[:120]
        for rank, pairs in enumerate(everyone)
        for here, host in pairs
        if here != host
    ]
    return title, found, len(everyone) * len(pairs)
