"""The traffic between two hosts: only the slices of a reduction cross the network, compressed."""

import re
import sys
import textwrap

import pytest

SCRIPT = """
    import numpy as np
    from mpi4py import MPI

    from keras_dist import _engine
    from keras_dist._engine.compression import Compression
    from keras_dist._engine import OpOptions, ReduceOp

    def sent():
        lines = [line.split() for line in open("/proc/self/net/dev")]
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
        expected = sum(node.astype(narrow).astype(np.float32) for node in nodes)
        expected = expected.astype(narrow).astype(np.float32)
        right = comm.world.allreduce(total.tobytes() == expected.tobytes(), MPI.LAND)
        if comm.rank == 0:
            places = f"{comm.topology.local_size} of {comm.size} ranks on a node"
            print(f"{compression.name}: {places}, right={right}, nbytes={nbytes}", flush=True)
"""


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_the_traffic_of_a_reduction(run_on_hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    job = run_on_hosts(sys.executable, 2, script)
    assert job.returncode == 0, job.stdout
    told = re.findall(r"(\w+): 2 of 4 ranks on a node, right=True, nbytes=(\d+)", job.stdout)
    nbytes = {name: int(count) for name, count in told}
    assert set(nbytes) == {"none", "fp16"}, job.stdout
    # A node sends half of its sum and half of the result, plus TCP headers.
    assert 4e6 <= nbytes["none"] < 4.4e6
    assert 2e6 <= nbytes["fp16"] < 2.2e6
