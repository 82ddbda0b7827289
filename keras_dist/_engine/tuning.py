"""The bucket size, measured once on the ranks of this job and cached.

Rank 0 reads and writes a file in the user's cache directory; if it is missing or cannot be read,
the ranks measure again.
"""

import contextlib
import functools
import json
import os
import pathlib
import platform
import tempfile
import time

import numpy as np

from keras_dist._engine.collectives.broadcast import allgather_object, broadcast_object
from keras_dist._engine.collectives.fused import FusedAllreduce
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.library import version
from keras_dist._engine.recovery import retry
from keras_dist._engine.signature import BucketOptions, CollectiveSignature, OpOptions

CANDIDATES = (4 * 2**20, 25 * 2**20, 64 * 2**20)
PROBE_COUNT, PROBE_NBYTES = 64, 2**20  # arrays, and bytes of each
PASSES, ROUNDS = 2, 3
# Another size must be faster by this factor: the usual one starts to reduce before backpropagation
# has ended, which the measurement does not see.
USUAL, CLEARLY = CANDIDATES[1], 0.9


def best_bucket_nbytes(
    comm: Communicator, call: CollectiveSignature, nbytes: int
) -> tuple[int, str]:
    """Returns the fastest bucket size for these ranks. Collective: every rank; blocks.

    The first time on a machine it takes as long as about 25 reductions of at most 64 MiB.

    Args:
        nbytes: size of the reduction in bytes; larger ones are not measured.

    Returns:
        The size in bytes, equal on all ranks, and a description of how it was found.
    """
    ranks = f"{comm.size} ranks, {comm.topology.cross_size} nodes"
    machine = f"{platform.node()}, {os.cpu_count()} cores, {ranks}, {_transport(comm)}"
    retry(comm, functools.partial(_rendezvous, comm, call))
    root = comm.ranks[0]
    known = broadcast_object(comm, _read_cache().get(machine) if comm.rank == 0 else None, root)
    if known is not None:
        return known, "as measured earlier on this machine"
    # Other load makes a reduction slower, never faster: the best of several passes counts, and
    # the passes of a candidate are spread over time.
    count = min(PROBE_COUNT, nbytes // PROBE_NBYTES)
    passes = [[_measure(comm, size, count) for size in CANDIDATES] for _ in range(PASSES)]
    # A step takes as long as that of the slowest rank.
    slowest = np.max(allgather_object(comm, np.min(passes, axis=0)), axis=0)
    seconds = dict(zip(CANDIDATES, slowest.tolist(), strict=True))
    fastest = min(seconds, key=lambda size: seconds[size])
    chosen = fastest if seconds[fastest] < CLEARLY * seconds[USUAL] else USUAL
    if comm.rank == 0:
        _write_cache(machine, chosen)
    times = ", ".join(f"{n >> 20} MiB: {1e3 * s:.1f} ms" for n, s in seconds.items())
    return chosen, f"measured on steps with {count} MiB of gradients ({times})"


def _rendezvous(comm: Communicator, call: CollectiveSignature) -> None:
    with comm.lock:
        rendezvous(comm, call)


def _measure(comm: Communicator, bucket_nbytes: int, count: int) -> float:
    """Returns the seconds of the gradient reduction of a training step, the best of some.

    Contributions are written before they are reduced and results are read, as by backpropagation
    and the optimizer: on memory that nothing else touches, small buckets stay in a cache and take
    0.8 of the time of large ones; within such a step they take 1.2 times as long.
    """
    arrays = [np.ones(PROBE_NBYTES // 4, np.float32) for _ in range(count)]
    weights = np.ones(PROBE_NBYTES // 4, np.float32)
    specs = [(array.shape, array.dtype) for array in arrays]
    names = [f"probe[{number}]" for number in range(count)]
    plan = BucketOptions(bucket_nbytes, operation="bucket size measurement", lend=True)
    fused = FusedAllreduce(comm, names, specs, OpOptions(), plan)

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


def _transport(comm: Communicator) -> str:
    if comm.node is None:
        return version(comm.mpi)
    return f"{version(comm.mpi)}, shared memory ({comm.reduce})"


def _file() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "keras_dist" / "bucket_nbytes.json"


def _read_cache() -> dict[str, int]:
    """Returns the cached sizes by machine; none if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = json.loads(_file().read_text()).items()
        return {machine: nbytes for machine, nbytes in known if nbytes in CANDIDATES}
    return {}


def _write_cache(machine: str, nbytes: int) -> None:
    """Replaces the file atomically: other jobs may read or write it at the same time."""
    with contextlib.suppress(OSError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**_read_cache(), machine: nbytes}, file, indent=1)
        os.replace(file.name, path)
