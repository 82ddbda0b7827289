"""What travels through MPI: pieces within its limits, and numbers that are rounded."""

import dataclasses

import conformance
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_dist
from keras_dist import _engine
from keras_dist._engine import collectives
from keras_dist._engine.compression import Wire
from keras_dist._engine.mpi import reduction, transfer

pytestmark = pytest.mark.jobs("engine")

SUM = _engine.OpOptions(_engine.ReduceOp.SUM)


class Limited:
    """An MPI communicator that limits the size of buffers."""

    def __init__(self, world):
        self._world = world

    def __getattr__(self, name):
        attribute = getattr(self._world, name)

        def checked(*arguments, **options):
            for argument in arguments:
                buffer = argument[0] if isinstance(argument, list) else argument
                nbytes = getattr(buffer, "nbytes", 0)
                assert nbytes <= transfer.MAX_NBYTES, f"{name} of {nbytes} bytes"
            return attribute(*arguments, **options)

        return checked if callable(attribute) else attribute


@pytest.mark.parametrize("number", range(12))
def test_no_call_of_mpi_needs_more_than_its_limit(monkeypatch, number):
    drawn = conformance.draw(number, keras_dist.size())
    program = dataclasses.replace(drawn, reduce="mpi", links=(0, False))
    conformance.prepare(monkeypatch, is_low=True, bucket_nbytes=program.bucket_nbytes)
    comm = conformance.communicator_of(program, MPI)
    assert comm.node is None
    comm.world = Limited(comm.world)
    execution = conformance.Execution(program, comm)
    execution.run()
    assert execution.wrong == []
    everyone = collectives.allgather_object(comm, list(range(2000 * (comm.rank + 1))))
    assert [len(numbers) for numbers in everyone] == [2000 * (r + 1) for r in range(comm.size)]
    assert collectives.broadcast_object(comm, "x" * 9000 * (comm.rank == 0), 0) == "x" * 9000
    rows = np.arange(2000.0 * comm.size)  # those of the programs are too few for these
    own = rows[2000 * comm.rank :][:2000]
    [found] = collectives.broadcast(comm, [rows + comm.rank], ["x"], 1)
    assert (found == rows + 1).all()
    found, _ = collectives.alltoall(comm, rows + comm.rank, None, "x")
    assert (found == np.concatenate([own + rank for rank in range(comm.size)])).all()
    [found] = collectives.reducescatter(comm, [rows], ["x"], SUM)
    assert (found == comm.size * own).all()
    comm.free()


def test_contributions_and_results_that_travel_as_a_whole_are_rounded(monkeypatch):
    monkeypatch.setattr(reduction, "SMALL_NBYTES", 2**20)
    dtype, narrow = np.float32, ml_dtypes.bfloat16
    rng = np.random.default_rng(0)
    everyone = (rng.standard_normal((keras_dist.size(), 10_007)) * 50).astype(dtype)
    wire = Wire(_engine.parse_compression("bf16", "[here]"), np.dtype(dtype), "[here]")
    mine, result = everyone[keras_dist.rank()], np.empty(10_007, dtype)
    sums = reduction.Combination(_engine.ReduceOp.SUM)
    reduction.reduce_through_mpi(MPI.COMM_WORLD, mine, result, sums, wire)
    total = np.zeros(10_007, dtype)
    for row in everyone:
        total += row.astype(narrow).astype(dtype)
    assert result.tobytes() == total.astype(narrow).astype(dtype).tobytes()
    reduction.reduce_through_mpi(MPI.COMM_WORLD, mine, mine, sums, wire)  # in place
    assert mine.tobytes() == result.tobytes()
