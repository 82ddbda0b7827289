"""Several nodes: emulated by MPICH, `MPIR_CVAR_NUM_CLIQUES=2 mpiexec -n 4`.

MPICH then reports that the two halves of the ranks share no memory.
"""

import itertools

import keras
import ml_dtypes
import numpy as np
import pytest
from bits import equal_on_all
from mpi4py import MPI
from test_rows import expected_of, rows_of

import keras_dist
from keras_dist import _engine, errors, runtime
from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.collectives import cross_node, row_exchange
from keras_dist._engine.mpi import reduction, transfer
from keras_dist._engine.mpi.links import Links
from keras_dist._engine.mpi.transfer import allgather_in_place
from keras_dist._engine.shm import bucket_reduction

pytestmark = pytest.mark.jobs("engine", "nodes-2x2", "nodes-2+1", "nodes-4x1")

OPS = ["sum", "average", "min", "max"]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32]
LARGE = 2**20
OTHER_DTYPES = [np.float64, np.complex64, np.int8, np.int16, np.int32]
OTHER_DTYPES += [np.uint16, np.uint32, np.uint64, ml_dtypes.float8_e4m3fn]
PAIRS = list(itertools.product(OPS, DTYPES))


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


def test_ranks_share_memory_if_a_node_has_several():
    several = max(keras_dist.allgather_object(keras_dist.local_size())) > 1
    assert (runtime.communicator().node is not None) == several


# Large arrays are tested with each operation and each dtype, not with all pairs: the computation
# of a pair does not depend on the location of the arrays.
@pytest.mark.parametrize(
    ("op", "dtype", "count"),
    [(*pair, count) for pair in PAIRS for count in (10, 50_000)]
    + [(*pair, LARGE) for pair in PAIRS if pair[0] == "sum" or pair[1] is np.float32],
)
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
    assert equal_on_all(result.tobytes())
    assert result.tobytes() == again.tobytes()


def test_a_bucket_is_reduced_on_the_nodes_first():
    shared_memory()
    comm = _engine.Communicator(MPI, None)
    arrays = [contribution(comm.rank, count, np.float32) for count in (LARGE, 100_000, 5)]
    specs = [(array.shape, array.dtype) for array in arrays]
    plan = _engine.PlanOptions(2**20, lend=True)
    fused = _engine.FusedAllreduce(comm, ["a", "b", "c"], specs, _engine.OpOptions(), plan)
    for _ in range(3):
        results = fused(arrays)
    assert fused.lends and fused.memory.is_ready(0)
    if comm.rank == comm.size - 1:  # it keeps memory that other ranks of its node would write to
        kept = results, [result.copy() for result in results]
    for _ in range(4):
        del results
        results = fused([array + 1 for array in arrays])
        del results
        results = fused(arrays)
    if comm.rank == comm.size - 1:
        for result, before in zip(*kept, strict=True):
            np.testing.assert_array_equal(result, before)
    for result, count in zip(results, (LARGE, 100_000, 5), strict=True):
        rows = [contribution(r, count, np.float32) for r in range(comm.size)]
        np.testing.assert_allclose(result, np.mean(rows, axis=0, dtype=np.float64), atol=1e-4)
    assert equal_on_all(*(result.tobytes() for result in results))
    comm.world.Barrier()
    comm.free()


@pytest.mark.parametrize("count", [50_000, 3 * LARGE])  # with the digests, and after them
@pytest.mark.parametrize("failure", [MemoryError, OSError])
def test_a_slice_that_one_rank_cannot_reduce_is_an_error_on_all_nodes(monkeypatch, failure, count):
    shared_memory()
    comm = _engine.Communicator(MPI, None)
    mine = contribution(comm.rank, count, np.float32)
    specs, options = [(mine.shape, mine.dtype)], _engine.OpOptions(ReduceOp.SUM)
    fused = _engine.FusedAllreduce(comm, ["a"], specs, options, _engine.PlanOptions(2**20))
    expected = fused([mine])[0].copy()
    odd = comm.rank == comm.topology.nodes[-1][0]
    travels = fused.travels(0, fused.memory.ready_reduction(0))
    assert travels or count > 50_000 or comm.links.halving_nbytes == 0
    said = "on purpose" if odd or travels else "another rank"

    def broken(*_):
        raise failure("on purpose")

    with monkeypatch.context() as patched:
        if odd:
            patched.setattr(bucket_reduction, "reduce_each", broken)
        with pytest.raises(errors.RankError, match=said):
            fused([mine])
    np.testing.assert_array_equal(fused([mine])[0], expected)
    comm.world.Barrier()
    comm.free()


def test_a_slice_that_cannot_be_reduced_beside_a_notice_is_an_error_on_all_nodes(monkeypatch):
    shared_memory()
    comm = runtime.communicator()
    mine = contribution(comm.rank, 50_000, np.float32)
    specs, options = [(mine.shape, mine.dtype)], _engine.OpOptions(ReduceOp.SUM)
    plan = _engine.PlanOptions(2**20, counts_updates=True)
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
        _engine.piggyback.set_listener(None)
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


class Counted:
    """A communicator of MPI that records messages, and nothing but messages may be sent."""

    def __init__(self, world, sent):
        self.world, self.sent = world, sent

    def __getattr__(self, name):
        assert name in ("Irecv", "Get_rank", "Get_size", "improbe"), f"{name} while counting"
        return getattr(self.world, name)

    def Isend(self, buffer, peer, tag):
        self.sent.append(buffer)
        return self.world.Isend(buffer, peer, tag)


# Small buckets that ranks of a node reduce as a whole, in one message and in two; slices; and
# buckets that are widened.
@pytest.mark.parametrize(
    ("count", "dtype", "op"),
    [(count, np.float32, "sum") for count in (1, 5_000, 12_000, 25_000, 32_000)]
    + [(5_000, np.float16, "average"), (25_000, ml_dtypes.bfloat16, "sum")]
    + [(5_000, np.uint8, "average"), (4_000, np.int64, "average"), (8_000, np.int64, "sum")]
    + [(5_000, np.float16, "product"), (5_000, np.bool_, "max")]
    + [(2_000, dtype, "sum") for dtype in OTHER_DTYPES]
    + [(2_000, dtype, "average") for dtype in OTHER_DTYPES],
)
def test_below_the_crossover_a_rank_sends_few_messages(monkeypatch, count, dtype, op):
    comm, sent = runtime.communicator(), []
    mine = contribution(comm.rank, count, dtype)
    # The measured crossover may be lower, or none.
    monkeypatch.setattr(comm, "links", Links(halving_nbytes=2**22))
    expected = keras_dist.allreduce(mine, op).copy()
    # Two for each doubling of the number of nodes, and one for the first half of a slice.
    has_halves = count * 4 > 64 * 1024 * comm.topology.slices
    most = 2 * (len(comm.topology.nodes) - 1).bit_length() + has_halves
    if count * 4 > 64 * 1024 and comm.topology.slices == 1 and dtype is not np.float32:
        pytest.skip("one rank on a node sends fewer bytes in pieces")
    with monkeypatch.context() as patched:
        if hasattr(comm.digests, "peers"):
            patched.setattr(comm.digests.peers, "_world", Counted(comm.digests.peers._world, sent))
        for owner in (comm, comm.topology):
            for name in ("world", "across", "local"):
                if getattr(owner, name, None) is not None:
                    patched.setattr(owner, name, Counted(getattr(owner, name), sent))
        for _ in range(2):  # the ordinary path, and the short one of buckets that are not widened
            sent.clear()
            result = keras_dist.allreduce(mine, op)
            assert result.tobytes() == expected.tobytes()
            assert len(sent) <= most
            assert bool(sent) == (comm.node is None or comm.topology.has_slice)


@pytest.mark.parametrize("limit", [5_000, 2**30])  # several messages, one
def test_a_part_of_the_rows_of_each_node_crosses_in_each_local_rank(monkeypatch, limit):
    comm, sent = runtime.communicator(), []
    parts = [rows_of(r, 400 * (r + 1), (16,)) for r in range(comm.size)]

    def recorded(world, buffer, bounds, in_place):
        low, high = bounds[world.Get_rank()]
        sent.append(high - low)
        allgather_in_place(world, buffer, bounds, in_place)

    monkeypatch.setattr(row_exchange, "allgather_in_place", recorded)
    monkeypatch.setattr(transfer, "MAX_NBYTES", limit)
    found, _ = keras_dist.sparse_allreduce(*parts[comm.rank])
    assert found.tobytes() == expected_of(parts, "average")[0].tobytes()
    if comm.node is None:
        assert sent == []
        return
    # Of each row and its index, one local rank of its node sends a byte to the other nodes.
    unique = sum(len(np.unique(indices)) for _, indices in parts)
    assert sum(keras_dist.allgather_object(sum(sent))) == unique * (16 * 4 + 8)


def test_a_rank_on_another_node_that_differs_is_named():
    odd = keras_dist.rank() == keras_dist.size() - 1
    with pytest.raises(errors.MismatchError, match=r"with shape \(200000,\) as on rank 0"):
        keras_dist.allreduce(np.ones(200_000 + odd, np.float32), name="loss")
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


@pytest.mark.parametrize("count", [1, 5_000, 16_000])
def test_ranks_that_differ_in_small_arrays_raise_and_continue(count):
    odd = keras_dist.rank() == keras_dist.size() - 1
    mine = np.full(count, keras_dist.rank(), np.float32)
    with pytest.raises(errors.MismatchError, match=rf"\({count + 1},\)"):
        keras_dist.allreduce(np.ones(count + odd, np.float32), name="loss")
    with pytest.raises(errors.MismatchError, match="barrier"):
        keras_dist.barrier() if odd else keras_dist.allreduce(mine)
    for _ in range(3):
        assert (keras_dist.allreduce(mine, "sum") == sum(range(keras_dist.size()))).all()


def test_a_rank_with_the_dtype_of_the_sums_is_named():
    odd = keras_dist.rank() == keras_dist.size() - 1
    mine = np.ones(1000, np.float32 if odd else np.float16)
    with pytest.raises(errors.MismatchError, match=r"with dtype float16 as on rank 0.*float32"):
        keras_dist.allreduce(mine, name="loss")
    assert (keras_dist.allreduce(np.ones(1000, np.float16), "sum") == keras_dist.size()).all()


@pytest.mark.parametrize("count", [1000, 50_000])
def test_gradients_arrive_beside_a_notice(count):
    comm = runtime.communicator()
    mine = contribution(comm.rank, count, np.float32)
    specs, options = [(mine.shape, mine.dtype)], _engine.OpOptions(ReduceOp.SUM)
    plan = _engine.PlanOptions(2**20, counts_updates=True)
    fused = _engine.FusedAllreduce(comm, ["a"], specs, options, plan)
    expected, notices = fused([mine])[0].copy(), []
    _engine.piggyback.set_listener(notices.extend)
    try:
        if comm.rank == comm.size - 1:
            _engine.piggyback.post("stop")
        np.testing.assert_array_equal(fused([mine])[0], expected)
        assert notices == ["stop"]
        np.testing.assert_array_equal(fused([mine])[0], expected)
    finally:
        _engine.piggyback.set_listener(None)


def test_results_that_are_kept_do_not_change():
    kept = [keras_dist.allreduce(np.full(count, 1.0), "sum") for count in 3 * (10, 50_000, LARGE)]
    for count in (10, 50_000, LARGE):
        keras_dist.allreduce(np.full(count, 2.0), "sum")
    assert all((result == keras_dist.size()).all() for result in kept)


class Half(keras_dist.Compressor):
    def __init__(self, factor):
        self.factor = factor

    def __str__(self):
        return self.name

    def compress(self, array):
        return (array * self.factor).astype(np.float16)

    def decompress(self, array, dtype):
        return array.astype(dtype) / self.factor


HALF = Half(64.0)


def rounded(array, compression):
    if compression == "none":
        return array
    if isinstance(compression, Half):
        return compression.decompress(compression.compress(array), array.dtype)
    narrow = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[compression]
    return array.astype(narrow).astype(array.dtype)


def travelled(rows, compression, divisor):
    """The expected sum of one row per rank: by node, rounded before or after that."""
    comm = runtime.communicator()
    first_added = comm.node is not None
    if not first_added:
        rows = [rounded(row, compression) for row in rows]
    rows = [added([rows[rank] for rank in ranks]) for ranks in comm.topology.nodes]
    if first_added:
        rows = [rounded(row, compression) for row in rows]
    total = added_in_rounds(rows)
    return rounded(total / total.dtype.type(divisor), compression)


def added_in_rounds(rows):
    """Adds neighbours until one is left; at first as many as leave a power of two."""
    while len(rows) > 1:
        paired = 2 * (len(rows) - 2 ** (len(rows).bit_length() - 1)) or len(rows)
        rows = [*map(np.add, rows[:paired:2], rows[1:paired:2]), *rows[paired:]]
    return rows[0]


def added(rows):
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@pytest.mark.parametrize("op", ["average", "sum", "product"])
@pytest.mark.parametrize("way", ["copy", "mpi"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_bits_do_not_depend_on_bucket_sizes_or_methods(op, way, dtype):
    """Small buckets are reduced by MPI directly, large ones by node."""
    comm = _engine.Communicator(runtime.communicator().mpi, None, way)
    arrays = [contribution(keras_dist.rank(), count, dtype) for count in (9_000, 1, 17_000) * 3]
    names = [str(number) for number in range(len(arrays))]
    reduced = [
        _engine.collectives.allreduce(
            comm, arrays, names, _engine.OpOptions(_engine.parse_op(op)), nbytes
        )
        for nbytes in (1, 50_000, 2**30)
    ]
    usual = keras_dist.grouped_allreduce(arrays, op)
    for number, expected in enumerate(usual):
        assert {results[number].tobytes() for results in reduced} == {expected.tobytes()}
    comm.free()


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
        assert bool(calls) == (dtype in (np.float32, np.float64) and takes_part)
    comm.free()


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.int64, np.float32])
@pytest.mark.parametrize("count", [10_000, 50_000])
def test_memory_that_cannot_be_shared_does_not_change_bits(monkeypatch, dtype, count):
    shared_memory()
    mine = contribution(keras_dist.rank(), count, dtype)
    expected = keras_dist.allreduce(mine)
    comm = _engine.Communicator(runtime.communicator().mpi, None)
    if comm.node is not None:
        monkeypatch.setattr(comm.node, "segment", lambda *_, **__: (None, "on purpose"))
    monkeypatch.setattr(comm, "warn_no_shared_memory", lambda reason: None)
    for _ in range(2):
        [found] = _engine.collectives.allreduce(comm, [mine], ["x"], _engine.OpOptions(), 2**23)
        assert found.tobytes() == expected.tobytes()
    comm.world.Barrier()
    comm.free()


# Sizes of 32 to 64 KiB in the dtype in which they travel; float32 would be compressed.
@pytest.mark.parametrize(
    ("dtype", "count"), [(np.int64, 4_000), (np.float16, 12_000), (np.complex64, 6_000)]
)
def test_arrays_that_are_never_compressed_travel_beside_a_compression(monkeypatch, dtype, count):
    comm = runtime.communicator()
    mine = contribution(comm.rank, count, dtype)
    for op in ("average", "sum"):
        if np.dtype(dtype).kind == "c" and op == "average":
            continue
        expected = keras_dist.allreduce(mine, op)
        with monkeypatch.context() as patched:
            patched.setattr(cross_node, "reduce_through_mpi", None)  # what travels does not use it
            found = keras_dist.allreduce(mine, op, compression="fp16")
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", HALF], ids=str)
@pytest.mark.parametrize("count", [10_000, 50_000])
def test_compressed_results_are_rounded_once(dtype, compression, count):
    rows = [contribution(r, count, dtype) for r in range(keras_dist.size())]
    result = keras_dist.allreduce(rows[keras_dist.rank()], compression=compression)
    expected = travelled(rows, compression, len(rows))
    assert result.tobytes() == expected.tobytes()
    assert equal_on_all(result.tobytes())
    if compression != "none":
        # Different by rounding errors only, but not equal.
        exact = np.mean(rows, axis=0, dtype=np.float64)
        off = np.abs(result - exact).max() / np.abs(rows).max()
        assert 2**-14 < off < 2**-6


# Segments of whole pieces, and of an element more on some ranks, where the last piece of others is
# empty.
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_pieces_between_nodes_do_not_change_bits(monkeypatch, dtype, more):
    comm = runtime.communicator()
    count = comm.size * len(comm.topology.nodes) * 12_000 + more
    mine = contribution(comm.rank, count, dtype)
    monkeypatch.setattr(comm, "links", Links())  # small segments are pieces as well
    compressions = ("none", "bf16")
    whole = [keras_dist.allreduce(mine, compression=each).tobytes() for each in compressions]
    monkeypatch.setattr(reduction, "piece_nbytes", lambda *_: 3000 * mine.itemsize)
    cut = [keras_dist.allreduce(mine, compression=each).tobytes() for each in compressions]
    assert cut == whole


def test_slow_links_do_not_change_bits(monkeypatch):
    comm = runtime.communicator()
    mine = contribution(comm.rank, comm.size * 3 * 2**18 + 5, np.float32)
    monkeypatch.setattr(comm, "links", Links())
    whole = keras_dist.allreduce(mine).tobytes()
    monkeypatch.setattr(comm, "links", Links(rate=1e6))
    assert keras_dist.allreduce(mine).tobytes() == whole


def test_nodes_know_the_same_links():
    comm = runtime.communicator()
    assert set(comm.world.allgather(comm.links)) == {comm.links}


def test_halving_does_not_change_bits(monkeypatch):
    comm = runtime.communicator()
    monkeypatch.setattr(comm, "links", Links())
    mine = contribution(comm.rank, 100_000, np.float32)
    whole = [keras_dist.allreduce(mine, op).tobytes() for op in OPS]
    monkeypatch.setattr(comm, "links", Links(halving_nbytes=2**30))
    assert [keras_dist.allreduce(mine, op).tobytes() for op in OPS] == whole


def test_small_and_other_arrays_are_not_compressed():
    for count, dtype in ((5_000, np.float32), (50_000, np.int64), (50_000, np.float16)):
        mine = contribution(keras_dist.rank(), count, dtype)
        exact = keras_dist.allreduce(mine, "sum")
        assert keras_dist.allreduce(mine, "sum", compression="bf16").tobytes() == exact.tobytes()


def test_gradients_are_compressed():
    count = 50_000
    rows = [contribution(r, count, np.float32) for r in range(keras_dist.size())]
    variable = keras.Variable(np.zeros(count, np.float32))
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="bf16")
    optimizer.apply([keras.ops.convert_to_tensor(rows[keras_dist.rank()])], [variable])
    expected = travelled(rows, "bf16", len(rows))
    np.testing.assert_array_equal(-np.asarray(variable), expected)


def test_a_wrong_compressor_is_an_error_on_every_rank():
    methods = {"decompress": lambda self, array, dtype: array}
    wrong = type("Wrong", (Half,), methods)(1.0)
    with pytest.raises(errors.ArgumentError, match="decompress of Wrong"):
        keras_dist.allreduce(np.ones(50_000, np.float32), compression=wrong)
    assert keras_dist.allreduce(1.0, "sum") == keras_dist.size()


KIB = 256  # elements of float32


@pytest.mark.parametrize("count", [KIB, 64 * KIB, 1024 * KIB])
@pytest.mark.parametrize("other", [0, KIB + 1, 63 * KIB, 1000 * KIB, 5000 * KIB])
def test_numbers_in_messages_do_not_outlive_a_difference(count, other):
    is_last = keras_dist.rank() == keras_dist.size() - 1
    mine, size = np.ones(count, np.float32), keras_dist.size()
    out = np.zeros_like(mine)
    for _ in range(2):  # the second call has a short path
        assert (keras_dist.allreduce(mine, "sum") == size).all()
    with pytest.raises(errors.MismatchError):
        if not is_last:
            keras_dist.allreduce(mine, "sum", out=out)
        elif other:
            keras_dist.allreduce(np.ones(other, np.float32), "sum")
        else:
            keras_dist.barrier()
    assert (out == 0).all() and (mine == 1).all()
    for _ in range(2):
        assert (keras_dist.allreduce(mine, "sum", out=out) == size).all()


@pytest.mark.parametrize("count", [KIB, 40 * KIB, 100 * KIB, 1024 * KIB, 3000 * KIB])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_a_short_path_has_the_bits_of_a_plan(count, op):
    mine = contribution(keras_dist.rank(), count, np.float32)
    first, second = keras_dist.allreduce(mine, op), keras_dist.allreduce(mine, op)
    [grouped] = keras_dist.grouped_allreduce([mine], op)
    by_name = keras_dist.allreduce(mine, op, name="bits")
    assert first.tobytes() == second.tobytes() == grouped.tobytes() == by_name.tobytes()
    assert equal_on_all(first)
