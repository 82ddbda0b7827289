"""Two nodes connected by TCP: two network namespaces of this machine, joined by a veth pair."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")
# Settings that make MPICH use the veth pair and no shared memory.
OVER_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "cable", "FI_TCP_IFACE": "cable"}
# A rank that fails while it starts leaves the other node waiting; mpiexec then ends the job.
LIMIT = {"MPIEXEC_TIMEOUT": "60"}
PLUGGED_IN = "grep -q up /sys/class/net/cable/operstate"

SCRIPT = """
    import numpy as np
    from mpi4py import MPI

    from keras_dist import _engine
    from keras_dist._engine.compression import Compression
    from keras_dist._engine import OpOptions, ReduceOp

    def sent():
        lines = [line.split() for line in open("/proc/self/net/dev")]
        return next(int(fields[9]) for fields in lines if fields[0] == "cable:")

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


@contextlib.contextmanager
def namespace():
    """The process that holds a network namespace; it ends with its standard input."""
    # UCX finds devices in /sys, which shows the namespace in which it was mounted.
    script = "mount -t sysfs sysfs /sys && echo ready && exec cat"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = ["unshare", "--net", "--mount", "sh", "-c", script]
    with subprocess.Popen(command, text=True, **pipes) as holder:
        try:
            said = holder.stdout.readline().strip()
            if said != "ready":
                pytest.skip(f"network namespaces may not be made here: {said}")
            yield inside(holder)
        finally:
            holder.stdin.close()


def inside(holder):
    """Returns the command under which another one runs in a namespace."""
    return ["nsenter", "--target", str(holder.pid), "--net", "--mount"]


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"namespaces cannot be joined here: {' '.join(command)}: {done.stderr}")


@pytest.fixture
def two_nodes():
    """The commands that enter two namespaces joined by a veth pair."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"network namespaces need {' and '.join(missing)}")
    with namespace() as first, namespace() as second:
        ends = [f"cable netns {node[2]}" for node in (first, second)]
        run(*f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
        for node, address in zip((first, second), ADDRESSES, strict=True):
            run(*node, *"ip link set lo up".split())
            run(*node, *f"ip address add {address}/24 dev cable".split())
            run(*node, *"ip link set cable up".split())
        for node in (first, second):
            # The kernel reports the link as up after a short time.
            run(*node, "sh", "-c", f"timeout 10 sh -c 'until {PLUGGED_IN}; do sleep 0.1; done'")
        yield first, second


def test_nodes_reduce_over_tcp(two_nodes, tmp_path):
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if "HYDRA" not in subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only MPICH's mpiexec is told how to reach the other node")
    here, there = two_nodes
    # Instead of ssh: options, the host, and a shell command.
    reach = tmp_path / "reach"
    skip_options = 'while [ "${1#-}" != "$1" ]; do shift; done; shift'
    reach.write_text(f'#!/bin/sh\n{skip_options}\nexec {" ".join(there)} sh -c "$*"\n')
    reach.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = [mpiexec, "-launcher", "ssh", "-launcher-exec", reach, "-iface", "cable"]
    ranks = ["-hosts", ",".join(ADDRESSES), "-ppn", "2", "-n", "4"]
    ended = subprocess.run(
        [*here, *launch, *ranks, sys.executable, script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env=os.environ | OVER_TCP | LIMIT,
    )
    assert ended.returncode == 0, ended.stdout
    told = re.findall(r"(\w+): 2 of 4 ranks on a node, right=True, nbytes=(\d+)", ended.stdout)
    nbytes = {name: int(count) for name, count in told}
    assert set(nbytes) == {"none", "fp16"}, ended.stdout
    # A node sends half of its sum and half of the result, plus TCP headers.
    assert 4e6 <= nbytes["none"] < 4.4e6
    assert 2e6 <= nbytes["fp16"] < 2.2e6
