"""Ten thousand operations of every kind, blocking and queued: correct results and no leaks."""

import ctypes
import dataclasses
import gc
import os
import threading

import conformance
import pytest
from mpi4py import MPI
from test_shared_memory import entries

import keras_dist
from keras_dist import runtime

pytestmark = pytest.mark.jobs("torch-3")

PROGRAMS = 10_000 // conformance.STEPS
WARM = PROGRAMS // 3  # every pool has its final size by then
OWN_NBYTES = 16 * 2**20  # normal variation; a leak of 3 KiB per operation would exceed it
SHARED_NBYTES = 2**20


def resources():
    """Returns file descriptors, threads, and the bytes of own and of shared memory."""
    keras_dist.barrier()  # dropped queued operations have run
    runtime.communicator()._forget_calls()  # the size of the kept results depends on which are kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    anon, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), anon, shared


def run(number, comm):
    """Runs a program of collectives, and operations on objects."""
    program = dataclasses.replace(conformance.draw(number, comm.size), reduce="copy")
    execution = conformance.Execution(program, comm)
    execution.run()
    assert execution.wrong == []
    root = number % comm.size
    assert keras_dist.broadcast_object((number, comm.rank), root) == (number, root)
    found = keras_dist.allgather_object("x" * comm.rank)
    assert found == ["x" * rank for rank in range(comm.size)]


@pytest.mark.slow
@pytest.mark.limit(300)
def test_ten_thousand_operations_are_right_and_leave_nothing_behind(monkeypatch):
    if keras_dist.size() != 3 or MPI.get_vendor()[0] != "MPICH":
        pytest.skip("takes a minute: run on 3 ranks, under the library with the shorter waits")
    conformance.prepare(monkeypatch, is_low=False, bucket_nbytes=25 * 2**20)
    before = None
    for number in range(PROGRAMS):
        if number == WARM:
            before = resources()
        run(number, runtime.communicator())
    handles, threads, anon, shared = resources()
    assert (handles, threads) == before[:2]
    assert anon < before[2] + OWN_NBYTES
    assert shared < before[3] + SHARED_NBYTES
    assert [name for name in entries() if f"-{os.getpid()}-" in name] == []
