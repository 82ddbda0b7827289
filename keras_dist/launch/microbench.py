"""The job of `keras-dist bench` and `doctor`: its root prints results as one line of JSON."""

import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np

from keras_dist import _engine, _gpu

SAMPLE_SECONDS = 0.02  # minimum duration of a sample
ALL_SECONDS = 2.0  # for all samples
MAX_CALLS, MIN_SAMPLES, MAX_SAMPLES = 200, 5, 15


def main() -> None:
    """Measures on every rank; words are a prefix for the line of JSON, and sizes in bytes."""
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
    gpus = _engine.collectives.allgather_object(comm, facts)
    _engine.set_gpus(comm, gpus, "auto", os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")
    ranks = [f"{gpu.bus_id} of {gpu.node}" if gpu.bus_id else "" for gpu in gpus]
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

    def sample(calls: int) -> float:
        mpi.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            reduce([mine])
        return mpi.COMM_WORLD.allreduce(time.perf_counter() - begin, mpi.MAX) / calls

    guess = min(sample(1) for _ in range(3))
    calls = max(1, min(MAX_CALLS, int(SAMPLE_SECONDS / guess)))
    count = max(MIN_SAMPLES, min(MAX_SAMPLES, int(ALL_SECONDS / (calls * guess))))
    return statistics.median(sample(calls) for _ in range(count))


if __name__ == "__main__":
    main()
