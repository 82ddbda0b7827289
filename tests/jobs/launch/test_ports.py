"""The ports that a running job opens, as the kernel lists them."""

import ast
import socket

import pytest
from start_jobs import BARE, lean

# Writes what this rank listens at besides the MPI library, which has opened its own ports before.
PROGRAM = """
import os
from mpi4py import MPI

def listening():
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in open(f"/proc/net/{kind}").readlines()[1:]:
            words = line.split()
            is_open = words[3] == "0A" or kind.startswith("udp")
            if is_open and f"socket:[{words[9]}]" in own:
                found.add((kind, *words[1].split(":")))
    return found

before = listening()
runtime.init()
opened = sorted(listening() - before)
with open(f"opened-{MPI.COMM_WORLD.rank}", "w") as file:
    print(opened, file=file)
MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture
def opened(run_ranks, tmp_path):
    """A function that returns the sockets that each rank of a job has opened in `init`."""

    def start(**variables):
        environment = lean(XDG_RUNTIME_DIR=str(tmp_path), **variables)
        job = run_ranks(2, "-c", BARE + PROGRAM, env=environment, cwd=tmp_path)
        assert job.returncode == 0, job.stdout
        return [ast.literal_eval((tmp_path / f"opened-{rank}").read_text()) for rank in range(2)]

    return start


def test_a_job_opens_no_port(opened):
    assert opened() == [[], []]


def test_a_port_to_watch_a_job_is_on_the_loopback_interface_of_the_root(opened, free_port):
    with socket.create_server(("127.0.0.1", 0)) as made:
        ports = made.getsockname()[1], free_port
    names = "KERAS_DIST_TOP_PORT", "KERAS_DIST_PROMETHEUS_PORT"
    loopback = "0100007F"  # 127.0.0.1
    found = sorted(("tcp", loopback, f"{port:04X}") for port in ports)
    assert opened(**dict(zip(names, map(str, ports), strict=True))) == [found, []]


def test_another_interface_is_named(opened, free_port):
    asked = {"KERAS_DIST_PROMETHEUS_PORT": f"0.0.0.0:{free_port}"}
    assert opened(**asked) == [[("tcp", "00000000", f"{free_port:04X}")], []]
