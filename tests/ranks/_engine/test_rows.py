"""sparse_allreduce: its bits, and the memory in which the rows of the ranks meet."""

import ml_dtypes
import numpy as np
import pytest
from bits import equal_on_all

import keras_dist
from keras_dist import errors, runtime
from keras_dist._engine import memory
from keras_dist._engine.collectives import row_exchange, slices

pytestmark = pytest.mark.jobs("engine")

RANK, SIZE = keras_dist.rank, keras_dist.size


def rows_of(rank, count, shape=(3,), table=500, dtype=np.float32):
    """Returns the rows of a rank and their indices; some occur several times."""
    rng = np.random.default_rng([rank, count])
    values = (rng.standard_normal((count, *shape)) * 10).astype(dtype)
    values[::5] = -0.0
    return values, rng.integers(0, table, count)


def added_at(parts):
    """Adds up rows one by one."""
    values, indices = (np.concatenate(each) for each in zip(*parts, strict=True))
    unique, inverse = np.unique(indices, return_inverse=True)
    total = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(total, inverse.reshape(-1), values)
    return total, unique


def expected_of(parts, op):
    """Adds up the rows of each rank, then those of the ranks, in rank order."""
    wide = [(v.astype(np.float32) if v.itemsize < 4 else v, i) for v, i in parts]
    total, unique = added_at([added_at([part]) for part in wide])
    total = total / total.dtype.type(len(parts)) if op == "average" else total
    return total.astype(parts[0][0].dtype), unique


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 32), (0,)])
def test_bits_are_those_of_rows_added_one_by_one(op, dtype, shape):
    # More rows than before, fewer, none on some ranks, none at all, with the memory of one call.
    for count in (lambda r: 300 * (r + 1), lambda r: 9, lambda r: 900 * (r % 2), lambda r: 0):
        parts = [rows_of(r, count(r), shape, dtype=dtype) for r in range(SIZE())]
        found, places = keras_dist.sparse_allreduce(*parts[RANK()], op)
        expected, unique = expected_of(parts, op)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(places, unique)
        assert found.tobytes() == expected.tobytes()
        assert equal_on_all(found.tobytes())


def test_rows_meet_in_shared_memory(monkeypatch):
    if runtime.communicator().node is None:
        pytest.skip("these ranks share no memory")
    monkeypatch.setattr(row_exchange, "gather_rows", None)
    parts = [rows_of(r, 100) for r in range(SIZE())]
    found, _ = keras_dist.sparse_allreduce(*parts[RANK()], "sum")
    assert found.tobytes() == expected_of(parts, "sum")[0].tobytes()


def test_without_shared_memory_the_bits_are_the_same(monkeypatch):
    parts = [rows_of(r, 100 * r + 50, (64,)) for r in range(SIZE())]
    shared, _ = keras_dist.sparse_allreduce(*parts[RANK()])
    monkeypatch.setattr(row_exchange, "_memory", lambda *arguments: None)
    sent, _ = keras_dist.sparse_allreduce(*parts[RANK()])
    assert sent.tobytes() == shared.tobytes()


def test_results_that_are_kept_do_not_change():
    parts = [rows_of(r, 200) for r in range(SIZE())]
    kept, _ = keras_dist.sparse_allreduce(*parts[RANK()])
    before = kept.copy()
    for _ in range(3):
        other, _ = keras_dist.sparse_allreduce(-parts[RANK()][0], parts[RANK()][1])
        other[...] = 7
    assert kept.tobytes() == before.tobytes()


def test_a_process_set_has_memory_of_its_own():
    if SIZE() < 3:
        pytest.skip("needs three ranks")
    ranks = list(range(0, SIZE(), 2))
    even = keras_dist.add_process_set(ranks)
    parts = [rows_of(r, 100) for r in range(SIZE())]
    of_all, _ = keras_dist.sparse_allreduce(*parts[RANK()], "sum")
    if even.included():
        found, _ = keras_dist.sparse_allreduce(*parts[RANK()], "sum", process_set=even)
        assert found.tobytes() == expected_of([parts[r] for r in ranks], "sum")[0].tobytes()
    assert of_all.tobytes() == expected_of(parts, "sum")[0].tobytes()
    keras_dist.remove_process_set(even)


def test_memory_that_is_not_used_is_released(monkeypatch):
    comm = runtime.communicator()
    if comm.node is None:
        pytest.skip("these ranks share no memory")
    monkeypatch.setattr(memory, "IDLE_UPDATES", 2)

    class Plan:
        def release(self):
            pass

    plan, part = Plan(), rows_of(RANK(), 100)
    first, _ = keras_dist.sparse_allreduce(*part)
    used = []
    for _ in range(3):  # as updates of other variables
        used.append(comm.row_memory._segment is not None)
        comm.idle_memory.used(plan)
    assert (used, comm.row_memory._segment) == ([True] * 3, None)
    assert keras_dist.sparse_allreduce(*part)[0].tobytes() == first.tobytes()


def test_a_rank_that_cannot_add_up_its_rows_is_an_error_on_all(monkeypatch):
    if runtime.communicator().node is None:
        pytest.skip("these ranks share no memory")
    odd = RANK() == SIZE() - 1
    part = rows_of(RANK(), 100)
    expected, _ = keras_dist.sparse_allreduce(*part)

    def fail(*arguments):
        raise MemoryError("on purpose")

    with monkeypatch.context() as patched:
        if odd:
            patched.setattr(slices, "_add_up", fail)
        with pytest.raises(errors.RankError, match="on purpose" if odd else "another rank"):
            keras_dist.sparse_allreduce(*part)
    assert keras_dist.sparse_allreduce(*part)[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_averages_of_rows_are_exact_if_the_sum_of_a_rank_overflows(dtype):
    limits = np.iinfo(dtype)
    twice = np.full(2, limits.max if RANK() % 2 else limits.min, dtype)
    rows, _ = keras_dist.sparse_allreduce(twice, np.array([3, 3]))
    total = sum(2 * int(limits.max if rank % 2 else limits.min) for rank in range(SIZE()))
    mean = abs(total) // SIZE() * (1 if total > 0 else -1)
    assert rows[0] == mean or not limits.min <= mean <= limits.max
