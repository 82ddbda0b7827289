"""How large buckets should be, measured on the ranks of this job once and then remembered.

The file in the user's cache directory is read and written by rank 0 alone; without it, or with
one that cannot be read, the ranks measure again.
"""

import contextlib
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import numpy as np

from keras_dist._engine.collectives.allreduce import FusedAllreduce
from keras_dist._engine.collectives.objects import broadcast_object
from keras_dist._engine.communicator import Communicator, library
from keras_dist._engine.reduce import ReduceOp

__all__ = ["best_bucket_nbytes"]

CANDIDATES = (4 * 2**20, 25 * 2**20, 64 * 2**20)
PROBE_COUNT, PROBE_NBYTES = 64, 2**20  # arrays, and bytes of each
ROUNDS = 3
# Another size must win by this factor: the usual one lets reducing begin before backpropagation
# has ended, which the measurement does not see.
USUAL, CLEARLY = CANDIDATES[1], 0.9


def best_bucket_nbytes(comm: Communicator) -> tuple[int, str]:
    """Returns the bucket size to use among these ranks. Collective: every rank; blocks.

    It takes the time of about ten reductions of 64 MiB, the first time on a machine.

    Args:
        comm: the ranks.

    Returns:
        The size in bytes, equal on all ranks, and how it was found, in words.
    """
    place = f"{platform.node()}, {comm.size} ranks, {comm.cross_size} nodes, {_way(comm)}"
    root = comm.ranks[0]
    known = broadcast_object(comm, _recall().get(place) if comm.rank == 0 else None, root)
    if known is not None:
        return known, "as measured earlier on this machine"
    seconds = {nbytes: _measure(comm, nbytes) for nbytes in CANDIDATES}
    fastest = min(seconds, key=lambda nbytes: seconds[nbytes])
    mine = fastest if seconds[fastest] < CLEARLY * seconds[USUAL] else USUAL
    chosen = broadcast_object(comm, mine, root)
    if comm.rank == 0:
        _remember(place, chosen)
    times = ", ".join(f"{n >> 20} MiB: {1e3 * s:.1f} ms" for n, s in seconds.items())
    return chosen, f"measured for 64 MiB of gradients ({times})"


def _measure(comm: Communicator, bucket_nbytes: int) -> float:
    """Returns the seconds of a reduction on this rank, a median."""
    arrays = [np.zeros(PROBE_NBYTES // 4, np.float32) for _ in range(PROBE_COUNT)]
    specs = [(array.shape, array.dtype) for array in arrays]
    names = [f"probe[{number}]" for number in range(PROBE_COUNT)]
    fused = FusedAllreduce(
        comm, names, specs, ReduceOp.SUM, bucket_nbytes, operation="measuring", lend=True
    )
    fused(arrays)
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        fused(arrays)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


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
