"""How large buckets should be, measured on the ranks of this job once and then remembered.

The file in the user's cache directory is read and written by rank 0 alone; without it, or with
one that cannot be read, the ranks measure again.
"""

import contextlib
import json
import os
import pathlib
import platform
import tempfile
import time

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.objects import allgather_object, broadcast_object
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.faults.retry import retry
from keras_dist._engine.mpi.library import library

__all__ = ["best_bucket_nbytes"]

CANDIDATES = (4 * 2**20, 25 * 2**20, 64 * 2**20)
PROBE_COUNT, PROBE_NBYTES = 64, 2**20  # arrays, and bytes of each
PASSES, ROUNDS = 2, 3
# Another size must win by this factor: the usual one lets reducing begin before backpropagation
# has ended, which the measurement does not see.
USUAL, CLEARLY = CANDIDATES[1], 0.9


def best_bucket_nbytes(
    comm: Communicator, call: CollectiveSignature, nbytes: int
) -> tuple[int, str]:
    """Returns the bucket size to use among these ranks. Collective: every rank; blocks.

    It takes the time of some 25 reductions of at most 64 MiB, the first time on a machine.

    Args:
        comm: the ranks.
        call: what is to be reduced; the ranks compare it first.
        nbytes: how many bytes that is; no more are tried.

    Returns:
        The size in bytes, equal on all ranks, and how it was found, in words.
    """
    ranks = f"{comm.size} ranks, {comm.cross_size} nodes"
    place = f"{platform.node()}, {os.cpu_count()} cores, {ranks}, {_way(comm)}"
    retry(comm, lambda: rendezvous(comm, call))
    root = comm.ranks[0]
    known = broadcast_object(comm, _recall().get(place) if comm.rank == 0 else None, root)
    if known is not None:
        return known, "as measured earlier on this machine"
    # Whatever else the machine does makes a reduction slower, never faster: so the best of
    # several counts, and those of a candidate are not all taken at the same time.
    count = min(PROBE_COUNT, nbytes // PROBE_NBYTES)
    passes = [[_measure(comm, size, count) for size in CANDIDATES] for _ in range(PASSES)]
    # A step is as long as that of the slowest rank.
    slowest = np.max(allgather_object(comm, np.min(passes, axis=0)), axis=0)
    seconds = dict(zip(CANDIDATES, slowest.tolist(), strict=True))
    fastest = min(seconds, key=lambda size: seconds[size])
    chosen = fastest if seconds[fastest] < CLEARLY * seconds[USUAL] else USUAL
    if comm.rank == 0:
        _remember(place, chosen)
    times = ", ".join(f"{n >> 20} MiB: {1e3 * s:.1f} ms" for n, s in seconds.items())
    return chosen, f"measured on steps with {count} MiB of gradients ({times})"


def _measure(comm: Communicator, bucket_nbytes: int, count: int) -> float:
    """Returns the seconds of what a training step does with gradients here, the best of some.

    Contributions are written before they are reduced and results are read, as backpropagation
    and the optimizer do: on memory that nobody else touches small buckets, which stay in a
    cache, take 0.8 of the time of large ones, and within such a step 1.2 times as long.
    """
    arrays = [np.ones(PROBE_NBYTES // 4, np.float32) for _ in range(count)]
    weights = np.ones(PROBE_NBYTES // 4, np.float32)
    specs = [(array.shape, array.dtype) for array in arrays]
    names = [f"probe[{number}]" for number in range(count)]
    fused = FusedAllreduce(
        comm, names, specs, ReduceOp.AVERAGE, bucket_nbytes, operation="measuring", lend=True
    )

    def step() -> None:
        results = []
        for number, bucket in enumerate(fused.buckets):
            members = [arrays[slot.index] for slot in bucket.slots]
            for array in members:
                array.fill(1)
            results += fused.reduce_bucket(number, members)
        for result in results:
            np.add(weights, result, out=weights)

    step()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times)


def _way(comm: Communicator) -> str:
    if comm.node is None:
        return library(comm.mpi)
    return f"{library(comm.mpi)}, shared memory ({comm.reduce})"


def _file() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "keras_dist" / "bucket_nbytes.json"


def _recall() -> dict[str, int]:
    """Returns what is remembered, by place; nothing when the file cannot be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = json.loads(_file().read_text()).items()
        return {place: nbytes for place, nbytes in known if nbytes in CANDIDATES}
    return {}


def _remember(place: str, nbytes: int) -> None:
    """Writes beside and moves: other jobs may read or write at the same time."""
    with contextlib.suppress(OSError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**_recall(), place: nbytes}, file, indent=1)
        os.replace(file.name, path)
