"""sparse_allreduce: its bits, and the memory in which the rows of the ranks meet."""

import types

import numpy as np
import pytest
from numpy_reference import summed_rows

import keras_dist
from keras_dist import errors, runtime
from keras_dist._engine import memory
from keras_dist._engine.collectives import rows, slices

pytestmark = pytest.mark.jobs("engine")

RANK, SIZE = keras_dist.rank, keras_dist.size


def rows_of(rank, count, shape=(3,), dtype=np.float32):
    """Returns the rows of a rank and their indices; some occur several times."""
    rng = np.random.default_rng([rank, count])
    values = (rng.standard_normal((count, *shape)) * 10).astype(dtype)
    values[::5] = -0.0
    return values, rng.integers(0, 500, count)


def expected_of(parts, op="average"):
    """Returns the sums or averages of the rows of all ranks."""
    return summed_rows(types.SimpleNamespace(op=op), parts)[0]


def shared_memory():
    if runtime.communicator().node is None:
        pytest.skip("these ranks share no memory")


def test_memory_that_is_not_used_is_released(monkeypatch):
    shared_memory()
    comm = runtime.communicator()
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


def test_rows_meet_in_shared_memory_where_an_error_on_one_rank_is_one_on_all(monkeypatch):
    shared_memory()
    monkeypatch.setattr(rows, "gather_rows", None)
    odd = RANK() == SIZE() - 1
    part = rows_of(RANK(), 100)

    def fail(*arguments):
        raise MemoryError("on purpose")

    with monkeypatch.context() as patched:
        if odd:
            patched.setattr(slices, "_add_up", fail)
        with pytest.raises(errors.RankError, match="on purpose" if odd else "another rank"):
            keras_dist.sparse_allreduce(*part)
    expected = expected_of([rows_of(rank, 100) for rank in range(SIZE())])
    assert keras_dist.sparse_allreduce(*part)[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_averages_of_rows_are_exact_if_the_sum_of_a_rank_overflows(dtype):
    limits = np.iinfo(dtype)
    twice = np.full(2, limits.max if RANK() % 2 else limits.min, dtype)
    rows, _ = keras_dist.sparse_allreduce(twice, np.array([3, 3]))
    total = sum(2 * int(limits.max if rank % 2 else limits.min) for rank in range(SIZE()))
    mean = abs(total) // SIZE() * (1 if total > 0 else -1)
    assert rows[0] == mean or not limits.min <= mean <= limits.max
