"""Messages that exceed the limits of MPI are sent in pieces without changes."""

import ml_dtypes
import numpy as np
import pytest
from bits import equal_on_all
from mpi4py import MPI

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine import OpOptions, ReduceOp
from keras_dist._engine.compression import wire_for
from keras_dist._engine.mpi import reduction, transfer

pytestmark = pytest.mark.jobs("engine")

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.complex64]
WIRES = ["none", "fp16", "bf16"]


@pytest.fixture(scope="module")
def comm():
    made = _engine.Communicator(MPI, None, "mpi")
    yield made
    made.free()


def draw(rank, shape, dtype):
    values = np.random.default_rng([rank, 7]).standard_normal(shape) * 50
    return values.astype(dtype)


def everything(comm, dtype):
    """Runs every collective on arrays of a few kilobytes; returns the bytes of all results."""
    rank, size = comm.rank, comm.size
    rows = draw(rank, (100 + 50 * rank, 3), dtype)
    even = draw(rank, (40 * size, 9), dtype)
    splits = [(rank + peer) % 2 * 100 // size for peer in range(size)]
    wide = draw(rank, 1201, dtype)
    small = draw(rank, 7, dtype)
    results = [
        _engine.collectives.allgather(comm, rows, "rows"),
        *_engine.collectives.grouped_allgather(comm, [rows, small], ["a", "b"]),
        *_engine.collectives.alltoall(comm, rows, splits, "rows"),
        *_engine.collectives.alltoall(comm, even, None, "even"),
        *_engine.collectives.broadcast(comm, [wide, small, small[0]], ["a", "b", "c"], size - 1),
        *_engine.collectives.allreduce(
            comm, [wide, small], ["a", "b"], OpOptions(ReduceOp.SUM), 1000
        ),
        *_engine.collectives.reducescatter(comm, [even], ["even"], OpOptions()),
    ]
    if np.issubdtype(dtype, np.floating) and size & (size - 1) == 0:
        results += _engine.collectives.adasum(comm, [wide], ["wide"], OpOptions(ReduceOp.ADASUM))
    _engine.collectives.broadcast_into(comm, [wide[::2], even[0]], ["a", "b"], 0)
    objects = _engine.collectives.allgather_object(comm, list(range(500 * (rank + 1))))
    objects.append(_engine.collectives.broadcast_object(comm, "x" * 3000 if rank == 0 else None, 0))
    return [result.tobytes() for result in [*results, wide, even]], objects


class Limited:
    """An MPI communicator that limits the size of buffers."""

    def __init__(self, world, limit):
        self._world, self._limit = world, limit

    def __getattr__(self, name):
        attribute = getattr(self._world, name)

        def checked(*arguments, **options):
            for argument in arguments:
                buffer = argument[0] if isinstance(argument, list) else argument
                nbytes = getattr(buffer, "nbytes", 0)
                assert nbytes <= self._limit, f"{name} of {nbytes} bytes"
            return attribute(*arguments, **options)

        return checked if callable(attribute) else attribute


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_call_of_mpi_needs_more_than_its_limit(comm, monkeypatch, dtype):
    unlimited = everything(comm, dtype)
    monkeypatch.setattr(transfer, "MAX_NBYTES", 1000)
    monkeypatch.setattr(reduction, "SMALL_NBYTES", 128)
    monkeypatch.setattr(comm, "world", Limited(comm.world, 1000))
    assert everything(comm, dtype) == unlimited


def reduced(comm, compression, op=ReduceOp.AVERAGE, dtype=np.float32, count=10_007, scale=1):
    flat = draw(comm.rank, count, dtype) * np.dtype(dtype).type(scale)
    wire = wire_for(_engine.parse_compression(compression, comm.where()), flat.dtype, "[test]")
    result = np.empty_like(flat)
    sums = reduction.Combination(op)
    reduction.reduce_through_mpi(comm.world, flat, result, sums, wire)
    assert equal_on_all(result.tobytes())
    reduction.reduce_through_mpi(comm.world, flat, flat, sums, wire)
    assert flat.tobytes() == result.tobytes()
    return flat


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, ml_dtypes.bfloat16])
def test_pieces_of_any_size_give_the_same_bits(comm, monkeypatch, compression, dtype):
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    whole = reduced(comm, compression, dtype=dtype)
    monkeypatch.setattr(reduction, "SMALL_NBYTES", 0)
    for nbytes in (5000, 1000):
        monkeypatch.setattr(reduction, "piece_nbytes", lambda *_, n=nbytes: n)
        assert reduced(comm, compression, dtype=dtype).tobytes() == whole.tobytes()


@pytest.mark.parametrize("small", [0, 2**20])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("compression", "narrow"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
def test_contributions_and_results_are_rounded(
    comm, monkeypatch, compression, narrow, dtype, small
):
    monkeypatch.setattr(reduction, "SMALL_NBYTES", small)
    total = np.zeros(10_007, dtype)
    for rank in range(comm.size):
        total += draw(rank, total.size, dtype).astype(narrow).astype(dtype)
    expected = total.astype(narrow).astype(dtype)
    assert reduced(comm, compression, ReduceOp.SUM, dtype).tobytes() == expected.tobytes()


def test_overflow_of_float16_is_infinite_on_all_ranks(comm):
    largest = reduced(comm, "fp16", ReduceOp.SUM, scale=10_000)
    contributions = [draw(rank, largest.size, np.float32) * 10_000 for rank in range(comm.size)]
    over = np.any(np.abs(contributions) > 65520, axis=0)
    assert over.any() and not over.all()
    assert not np.isfinite(largest[over]).any()


def test_only_data_between_nodes_is_compressed():
    if not runtime.communicator().is_one_node:
        pytest.skip("the ranks are on several nodes")
    value = draw(keras_dist.rank(), 50_000, np.float32)
    exact = keras_dist.allreduce(value)
    assert keras_dist.allreduce(value, compression="fp16").tobytes() == exact.tobytes()


def test_different_compressions_are_an_error():
    if keras_dist.size() == 1:
        pytest.skip("one rank agrees with itself")
    odd = keras_dist.rank() == keras_dist.size() - 1
    with pytest.raises(errors.MismatchError, match=r"compression='none' in .* compression='fp16'"):
        keras_dist.allreduce(1.0, compression="fp16" if odd else "none")
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()
