"""The bytes that each node sends in a reduction, with and without compression."""

from pathlib import Path

import numpy as np
from mpi4py import MPI

from keras_dist import _engine
from keras_dist._engine import OpOptions, ReduceOp
from keras_dist._engine.compression import Compression


def sent() -> int:
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()]
    return next(int(fields[9]) for fields in lines if fields[0] == "eth0:")


comm = _engine.Communicator(MPI)
rows = [
    np.random.default_rng(rank).standard_normal(1_000_000).astype(np.float32)
    for rank in range(comm.size)
]
nodes = [rows[first] + rows[first + 1] for first in range(0, comm.size, 2)]
for compression, narrow in ((Compression.none, np.float32), (Compression.fp16, np.float16)):
    before = sent()
    [total] = _engine.collectives.allreduce(
        comm, [rows[comm.rank]], ["x"], OpOptions(ReduceOp.SUM, compression=compression), 2**25
    )
    comm.world.Barrier()
    nbytes = sent() - before
    expected = np.sum([node.astype(narrow).astype(np.float32) for node in nodes], axis=0)
    expected = expected.astype(narrow).astype(np.float32)
    right = comm.world.allreduce(total.tobytes() == expected.tobytes(), MPI.LAND)
    if comm.rank == 0:
        places = f"{comm.topology.local_size} of {comm.size} ranks on a node"
        print(f"{compression.name}: {places}, right={right}, nbytes={nbytes}", flush=True)
