"""Micro-benchmarks on the ranks of a job.

The job of `keras-dist bench` and `keras-dist doctor`. It imports no framework, and its root prints
the results as one line of JSON. The benchmarks of the repository use the same functions.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from keras_dist import _engine, _gpu

SAMPLE_SECONDS = 0.02  # minimum duration of a sample
CONTENDER_SECONDS = 2.0  # for all samples of one contender
MAX_CALLS = 200
ROUNDS = (5, 15)


def in_turn(
    contenders: Iterable[str], rounds: int, measure: Callable[[str], float]
) -> dict[str, list[float]]:
    """Measures contenders alternately: in a random order in one round, and in reverse in the next.

    The order is the same on all ranks. It varies because a contender may leave ranks on other
    cores, or caches empty, for the next one.
    """
    names, order = list(contenders), random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number % 2:
            names.reverse()
        else:
            order.shuffle(names)
        for name in names:
            found[name].append(measure(name))
    return found


def compare(
    mpi: Any, calls: Mapping[str, Callable[[], Any]], rounds: tuple[int, int]
) -> dict[str, list[float]]:
    """Times collective calls alternately. Collective: every rank of the world."""
    world = mpi.COMM_WORLD

    def sample(name: str, number: int) -> float:
        call = calls[name]
        world.Barrier()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        return world.allreduce(time.perf_counter() - begin, mpi.MAX) / number

    guess = {name: min(sample(name, 1) for _ in range(3)) for name in calls}
    numbers = {name: max(1, min(MAX_CALLS, int(SAMPLE_SECONDS / guess[name]))) for name in calls}
    longest = max(numbers[name] * guess[name] for name in calls)
    count = max(rounds[0], min(rounds[1], int(CONTENDER_SECONDS / longest)))
    return in_turn(calls, count, lambda name: sample(name, numbers[name]))


def main() -> None:
    """Measures on every rank.

    The command line holds a prefix for the line of JSON, and sizes in bytes.
    """
    from mpi4py import MPI

    mark, *sizes = sys.argv[1:]
    comm = _engine.Communicator(MPI, None)
    _engine.library.unlink_mpich_memory()
    found = {
        "library": _engine.library.version(MPI),
        "ranks": comm.size,
        "hosts": sorted(set(_engine.collectives.allgather_object(comm, os.uname().nodename))),
        "several_threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "from_other_threads": MPI.Query_thread() >= MPI.THREAD_SERIALIZED,
        "shares_memory": comm.node is not None,
        "cuda_aware": _engine.library.is_cuda_aware(),
        "gpus": _gpus(comm),
        "seconds": {nbytes: _reduction(MPI, comm, int(nbytes)) for nbytes in sizes},
    }
    comm.free()
    if MPI.COMM_WORLD.rank == 0:
        print(mark + json.dumps(found), flush=True)


def _gpus(comm: _engine.Communicator) -> dict[str, Any]:
    """Returns the GPU of each rank, as `keras_dist.init` selects it, and the path of its arrays."""
    runtime = _gpu.load_runtime()
    count = 0 if runtime is None else runtime.count()
    facts = _gpu.facts_of(comm.topology.local_rank % count if count else None)
    gpus = _engine.collectives.allgather_object(comm, _engine.RankGpu(os.uname().nodename, facts))
    _engine.set_gpus(comm, gpus, "auto", os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")
    ranks = [f"{gpu.facts.bus_id} of {gpu.node}" if gpu.facts.bus_id else "" for gpu in gpus]
    return {"ranks": ranks, "path": str(_engine.path_of(comm))}


def _reduction(mpi: Any, comm: _engine.Communicator, nbytes: int) -> float:
    """Returns the seconds of a reduction of a size in bytes, after checking its result."""
    pattern = np.arange(nbytes // 4, dtype=np.float32) % 251
    mine = pattern + comm.rank
    specs = [(mine.shape, mine.dtype)]
    options = _engine.OpOptions(_engine.ReduceOp.SUM)
    plan = _engine.BucketOptions(mine.nbytes, lend=True)
    reduce = _engine.FusedAllreduce(comm, ["gradients"], specs, options, plan)
    expected = pattern * comm.size + sum(range(comm.size))
    for _ in range(3):
        if not mpi.COMM_WORLD.allreduce(np.array_equal(reduce([mine])[0], expected), mpi.LAND):
            raise SystemExit(f"a reduction of {nbytes} bytes has a wrong result")
    samples = compare(mpi, {"ours": lambda: reduce([mine])}, ROUNDS)
    return statistics.median(samples["ours"])


if __name__ == "__main__":
    main()
