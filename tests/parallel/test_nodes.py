"""Several nodes: emulated by MPICH, `MPIR_CVAR_NUM_CLIQUES=2 mpiexec -n 4`.

MPICH then tells two halves of the ranks that they share no memory with the other half.
"""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine import bucket_reduction
from keras_dist._engine.reduce import ReduceOp

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32]
LARGE = bucket_reduction.READ_NBYTES // 4


@pytest.fixture(autouse=True)
def several_nodes():
    if runtime.communicator().is_one_node:
        pytest.skip("all ranks are on one node: set MPIR_CVAR_NUM_CLIQUES=2 under MPICH")


def even_nodes():
    if not keras_dist.is_homogeneous():
        pytest.skip("the nodes have different numbers of ranks")


def contribution(rank, count, dtype):
    return (np.random.default_rng(rank).standard_normal(count) * 20).astype(dtype)


def test_ranks_know_their_nodes():
    size, local_size = keras_dist.size(), keras_dist.local_size()
    assert keras_dist.cross_size() > 1 or not keras_dist.is_homogeneous()
    assert 0 <= keras_dist.local_rank() < local_size < size
    places = keras_dist.allgather_object((keras_dist.cross_rank(), keras_dist.local_rank()))
    assert len(set(places)) == size


def test_ranks_of_even_nodes_share_memory():
    assert (runtime.communicator().node is not None) == (
        keras_dist.is_homogeneous() and keras_dist.local_size() > 1
    )


@pytest.mark.parametrize("op", ["sum", "average", "min", "max"])
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32]
)
@pytest.mark.parametrize("count", [10, 50_000, LARGE])
def test_results_equal_numpy_and_have_the_same_bits(op, dtype, count):
    mine = contribution(keras_dist.rank(), count, dtype)
    rows = np.stack([contribution(r, count, dtype) for r in range(keras_dist.size())])
    wide = rows.astype(np.float64)
    expected = {"sum": wide.sum, "average": wide.mean, "min": wide.min, "max": wide.max}[op](axis=0)
    if np.issubdtype(dtype, np.integer):
        expected = np.trunc(expected)
    result = keras_dist.allreduce(mine, op)
    tolerance = 1e-6 if np.dtype(dtype).itemsize >= 4 else 2e-2
    scale = np.abs(wide).max()
    np.testing.assert_allclose(result.astype(np.float64), expected, atol=tolerance * scale, rtol=0)
    again = keras_dist.allreduce(mine, op)
    assert len(set(keras_dist.allgather_object((result.tobytes(), again.tobytes())))) == 1
    assert result.tobytes() == again.tobytes()


@pytest.mark.parametrize("way", ["copy", "read"])
def test_a_bucket_is_reduced_on_the_nodes_first(way):
    even_nodes()
    comm = _engine.Communicator(MPI, None, way)
    arrays = [contribution(comm.rank, count, np.float32) for count in (LARGE, 100_000, 5)]
    specs = [(array.shape, array.dtype) for array in arrays]
    fused = _engine.FusedAllreduce(comm, ["a", "b", "c"], specs, ReduceOp.AVERAGE, 2**20, lend=True)
    for _ in range(3):
        results = fused(arrays)
    assert fused.nbytes > 2 * 4 * LARGE
    for result, count in zip(results, (LARGE, 100_000, 5), strict=True):
        rows = [contribution(r, count, np.float32) for r in range(comm.size)]
        np.testing.assert_allclose(result, np.mean(rows, axis=0, dtype=np.float64), atol=1e-4)
    digests = comm.world.allgather(b"".join(result.tobytes() for result in results))
    assert len(set(digests)) == 1
    comm.world.Barrier()
    comm.free()


def test_a_rank_on_another_node_that_differs_is_named():
    odd = keras_dist.rank() == keras_dist.size() - 1
    with pytest.raises(errors.MismatchError, match=r"with shape \(200000,\) as on rank 0"):
        keras_dist.allreduce(np.ones(200_000 + odd, np.float32), name="loss")
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()
