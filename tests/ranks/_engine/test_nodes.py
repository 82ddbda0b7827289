"""Several nodes: emulated by MPICH, `MPIR_CVAR_NUM_CLIQUES=2 mpiexec -n 4`.

MPICH then reports that the two halves of the ranks share no memory.
"""

import keras
import numpy as np
import pytest
from bits import equal_on_all
from test_rows import expected_of, rows_of

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives import rows
from keras_dist._engine.mpi import reduction, transfer
from keras_dist._engine.mpi.transfer import allgather_parts
from keras_dist._engine.shm import bucket_reduction

pytestmark = pytest.mark.jobs("nodes-2x2", "nodes-2+1", "nodes-4x1")


@pytest.fixture(autouse=True)
def several_nodes():
    if runtime.communicator().is_one_node:
        pytest.skip("all ranks are on one node: set MPIR_CVAR_NUM_CLIQUES=2 under MPICH")


def shared_memory():
    if runtime.communicator().node is None:
        pytest.skip("one rank a node shares memory with nobody")


def contribution(rank, count, dtype):
    return (np.random.default_rng(rank).standard_normal(count) * 20).astype(dtype)


def test_ranks_know_their_nodes():
    size, local_size = keras_dist.size(), keras_dist.local_size()
    assert keras_dist.cross_size() > 1 or not keras_dist.is_homogeneous()
    assert 0 <= keras_dist.local_rank() < local_size < size
    places = keras_dist.allgather_object((keras_dist.cross_rank(), keras_dist.local_rank()))
    if keras_dist.is_homogeneous():
        assert len(set(places)) == size
    nodes = runtime.communicator().topology.nodes
    mine = nodes.index([r for r in range(size) if places[r][0] == places[keras_dist.rank()][0]])
    assert nodes[mine].index(keras_dist.rank()) == keras_dist.local_rank()
    several = max(keras_dist.allgather_object(local_size)) > 1
    assert (runtime.communicator().node is not None) == several
    are_slow = runtime.communicator().links_are_slow
    assert set(keras_dist.allgather_object(are_slow)) == {are_slow}


def test_a_slice_that_cannot_be_reduced_beside_a_notice_is_an_error_on_all_nodes(monkeypatch):
    shared_memory()
    comm = runtime.communicator()
    mine = contribution(comm.rank, 50_000, np.float32)
    specs, options = [(mine.shape, mine.dtype)], _engine.OpOptions(ReduceOp.SUM)
    plan = _engine.BucketOptions(2**20, counts_updates=True)
    fused = _engine.FusedAllreduce(comm, ["a"], specs, options, plan)
    expected = fused([mine])[0].copy()

    def broken(*_):
        raise OSError("on purpose")

    def stop(_):
        if comm.rank == 0:  # what travels after the notice
            monkeypatch.setattr(bucket_reduction, "reduce_each", broken)

    _engine.piggyback.set_listener(stop)
    try:
        if comm.rank == comm.size - 1:
            _engine.piggyback.post("stop")
        with pytest.raises(errors.RankError, match="every rank to reduce its slice"):
            fused([mine])
    finally:
        _engine.piggyback.remove_listener(stop)
        monkeypatch.undo()
    np.testing.assert_array_equal(fused([mine])[0], expected)


def test_the_error_of_a_slice_is_raised_once(monkeypatch):
    shared_memory()
    mine, odd = np.ones(50_000, np.float32), keras_dist.rank() == keras_dist.size() - 1
    for _ in range(2):  # the second call has a short path
        keras_dist.allreduce(mine, "sum")

    def broken(*_):
        raise OSError("on purpose")

    with monkeypatch.context() as patched:
        if keras_dist.rank() == 0:
            patched.setattr(bucket_reduction, "reduce_each", broken)
        with pytest.raises(errors.RankError, match="every rank to reduce its slice"):
            keras_dist.allreduce(mine, "sum")
    with pytest.raises(errors.MismatchError):
        keras_dist.barrier() if odd else keras_dist.allreduce(mine, "sum")
    assert (keras_dist.allreduce(mine, "sum") == keras_dist.size()).all()


@pytest.mark.parametrize("limit", [5_000, 2**30])  # several messages, one
def test_a_part_of_the_rows_of_each_node_crosses_in_each_local_rank(monkeypatch, limit):
    comm, sent = runtime.communicator(), []
    parts = [rows_of(r, 400 * (r + 1), (16,)) for r in range(comm.size)]

    def recorded(world, mine, buffer, bounds):
        low, high = bounds[world.Get_rank()]
        sent.append(high - low)
        allgather_parts(world, mine, buffer, bounds)

    monkeypatch.setattr(rows, "allgather_parts", recorded)
    monkeypatch.setattr(transfer, "MAX_NBYTES", limit)
    found, _ = keras_dist.sparse_allreduce(*parts[comm.rank])
    assert found.tobytes() == expected_of(parts).tobytes()
    if comm.node is None:
        assert sent == []
        return
    # Of each row and its index, one local rank of its node sends a byte to the other nodes.
    unique = sum(len(np.unique(indices)) for _, indices in parts)
    assert sum(keras_dist.allgather_object(sum(sent))) == unique * (16 * 4 + 8)


def test_a_rank_with_the_dtype_of_the_sums_is_named():
    odd = keras_dist.rank() == keras_dist.size() - 1
    mine = np.ones(1000, np.float32 if odd else np.float16)
    with pytest.raises(errors.MismatchError, match=r"with dtype float16 as on rank 0.*float32"):
        keras_dist.allreduce(mine, name="loss")
    assert (keras_dist.allreduce(np.ones(1000, np.float16), "sum") == keras_dist.size()).all()


@pytest.mark.parametrize("op", ["average", "sum", "product", "min", "max"])
@pytest.mark.parametrize("way", ["copy", "mpi"])
def test_the_library_reduces_between_nodes_on_request(monkeypatch, op, way):
    comm = _engine.Communicator(runtime.communicator().mpi, None, way, reduction="library")
    by_library, calls = reduction._reduce_by_library, []

    def recorded(*arguments):
        calls.append(arguments)
        by_library(*arguments)

    monkeypatch.setattr(reduction, "_reduce_by_library", recorded)
    monkeypatch.setattr(reduction.transfer, "MAX_NBYTES", 100_000)  # several calls of MPI
    for dtype in (np.float32, np.float64, np.int32, np.bool_):
        if dtype is np.bool_ and op in ("average", "sum"):
            continue
        calls.clear()
        mine = contribution(keras_dist.rank(), 50_000, dtype)
        options = _engine.OpOptions(_engine.parse_op(op))
        [found] = _engine.collectives.allreduce(comm, [mine], ["x"], options, 2**23)
        expected = keras_dist.allreduce(mine, op)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        assert equal_on_all(found.tobytes())
        takes_part = comm.node is None or comm.topology.has_slice
        is_sum = op not in ("min", "max") and dtype in (np.float32, np.float64)
        assert bool(calls) == (is_sum and takes_part)
    comm.free()


@pytest.mark.parametrize("op", ["min", "max"])
def test_a_nan_is_in_extremes_of_all_ranks_whatever_reduces_between_nodes(op):
    mine = np.ones(50_000, np.float32)
    mine[keras_dist.rank() :: 7] = np.nan
    expected = np.arange(len(mine)) % 7 < keras_dist.size()
    for way in ("ordered", "library"):
        comm = _engine.Communicator(runtime.communicator().mpi, None, "copy", reduction=way)
        options = _engine.OpOptions(_engine.parse_op(op))
        [found] = _engine.collectives.allreduce(comm, [mine], ["x"], options, 2**23)
        np.testing.assert_array_equal(np.isnan(found), expected)
        comm.free()


def test_gradients_are_compressed():
    mine = contribution(keras_dist.rank(), 50_000, np.float32)
    variable = keras.Variable(np.zeros_like(mine))
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="bf16")
    optimizer.apply([keras.ops.convert_to_tensor(mine)], [variable])
    expected = keras_dist.allreduce(mine, compression="bf16")
    np.testing.assert_array_equal(-np.asarray(variable), expected)
