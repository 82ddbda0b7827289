"""Large gradients of which few rows differ from zero: only these rows travel."""

import ml_dtypes
import numpy as np
import pytest
from bits import equal_on_all

import keras_dist
from keras_dist import _engine, runtime
from keras_dist._engine.arithmetic import ReduceOp

pytestmark = pytest.mark.jobs("nodes-2+1", "nodes-4x1", "torch-2")

LENGTH = 4000


def reduction(shape, dtype, op=ReduceOp.SUM, tables=(1,), **factors):
    """Returns the plan of a small array and one like a table."""
    specs = [((3,), np.dtype(np.float32)), (shape, np.dtype(dtype))]
    plan = _engine.BucketOptions(2**20, tables=tables)
    options = _engine.OpOptions(op, **factors)
    comm = runtime.communicator()
    return _engine.FusedAllreduce(comm, ["small", "table"], specs, options, plan)


def gradient(rank, shape, dtype, rows=40):
    """Returns a table with whole numbers in some rows, which every order adds up alike."""
    rng = np.random.default_rng(rank)
    table = np.zeros(shape, np.float32)
    table[rng.integers(0, len(table), rows)] = rng.integers(-8, 9, (rows, *shape[1:]))
    return table.astype(dtype)


def both(fused, mine):
    small, table = fused([np.ones(3, np.float32), mine])
    assert (small == small[0]).all()
    return table


@pytest.mark.parametrize(
    ("dtype", "width", "op"),
    [
        (np.float32, 64, ReduceOp.AVERAGE),
        (np.float64, 1, ReduceOp.SUM),
        (np.float16, 3, ReduceOp.SUM),
        (ml_dtypes.bfloat16, 64, ReduceOp.AVERAGE),
        (np.int32, 3, ReduceOp.AVERAGE),
    ],
)
def test_few_rows_give_the_table_of_a_dense_reduction(rows_travelled, dtype, width, op):
    size, shape = keras_dist.size(), (LENGTH, width)
    fused, dense = reduction(shape, dtype, op), reduction(shape, dtype, op, tables=())
    earlier = None
    for step in range(3):
        mine = gradient(keras_dist.rank() + size * step, shape, dtype)
        kept = mine.copy()
        found = both(fused, mine)
        np.testing.assert_array_equal(found, both(dense, mine))
        np.testing.assert_array_equal(mine, kept)
        assert equal_on_all(found)
        if earlier is not None:  # a result that is held stays as it is
            np.testing.assert_array_equal(*earlier)
        earlier = found, found.copy()
        found = None
    assert rows_travelled == [True] * 3


def test_factors_apply_to_rows(rows_travelled):
    fused = reduction((LENGTH, 8), np.float32, prescale=0.5, postscale=4.0)
    total = sum(gradient(rank, (LENGTH, 8), np.float32) for rank in range(keras_dist.size()))
    np.testing.assert_array_equal(
        both(fused, gradient(keras_dist.rank(), (LENGTH, 8), np.float32)), 2 * total
    )
    assert rows_travelled == [True]


def test_a_result_that_a_framework_writes_to_is_not_in_the_next(rows_travelled):
    fused = reduction((LENGTH, 8), np.float32)
    for step in range(3):
        found = both(fused, gradient(step, (LENGTH, 8), np.float32))
        np.testing.assert_array_equal(
            found, keras_dist.size() * gradient(step, (LENGTH, 8), np.float32)
        )
        found += 1
        del found
    assert rows_travelled == [True] * 3


@pytest.mark.parametrize("width", [1, 64])
def test_nan_and_negative_zero_are_rows_of_their_own(rows_travelled, width):
    mine = np.zeros((LENGTH, width), np.float32)
    if keras_dist.rank() == 1:
        mine[7, -1], mine[9, -1], mine[-1, 0] = np.nan, np.inf, -0.0
        [table] = reduction(mine.shape, np.float32)._tables.values()
        np.testing.assert_array_equal(table.rows(mine).indices, [7, 9, LENGTH - 1])
    found = both(reduction(mine.shape, np.float32), mine)
    assert np.isnan(found[7, -1]) and found[9, -1] == np.inf
    assert np.count_nonzero(found) == 2
    assert rows_travelled == [True]


@pytest.mark.parametrize("full", ["one rank", "all ranks", "together"])
def test_many_rows_are_reduced_whole_on_all_ranks(rows_travelled, full):
    rank, size = keras_dist.rank(), keras_dist.size()
    rows = {"one rank": LENGTH if rank == 0 else 5, "all ranks": LENGTH, "together": LENGTH // 5}
    mine = np.zeros((LENGTH, 8), np.float32)
    mine[: rows[full]] = rank + 1
    fused = reduction(mine.shape, np.float32)
    for few in (False, True, False):  # a step decides anew
        now = gradient(rank, mine.shape, np.float32) if few else mine
        whole = keras_dist.allgather(now[np.newaxis]).sum(0, dtype=np.float32)
        np.testing.assert_array_equal(both(fused, now), whole)
    assert rows_travelled == [False, True, False]
    assert size > 1


@pytest.mark.parametrize("knowing", ["all ranks", "one rank"])
@pytest.mark.parametrize("rows", [40, LENGTH])
def test_rows_that_are_known_are_those_of_the_table(rows_travelled, knowing, rows):
    rank, shape = keras_dist.rank(), (LENGTH, 8)
    rng = np.random.default_rng(rank)
    indices = rng.integers(0, LENGTH, rows)
    indices[:2] = 7  # equal ones add up
    values = rng.integers(-8, 9, (rows, 8)).astype(np.float32)
    known = _engine.TableRows(values, indices, shape)
    mine = np.zeros(shape, np.float32)
    np.add.at(mine, indices, values)
    total = keras_dist.allreduce(mine, "average") * 6
    is_known = knowing == "all ranks" or rank == 1
    found = both(
        reduction(shape, np.float32, ReduceOp.AVERAGE, prescale=2.0, postscale=3.0),
        known if is_known else mine,
    )
    assert rows_travelled == [rows < LENGTH]
    if rows < LENGTH and is_known:
        found = found.dense()
    np.testing.assert_allclose(found, total, rtol=1e-6)


def test_ranks_that_have_joined_bring_no_rows(rows_travelled):
    rank, size, shape = keras_dist.rank(), keras_dist.size(), (LENGTH, 8)
    fused = reduction(shape, np.float32)
    if rank > 0:
        mine = gradient(rank, shape, np.float32)
        if rank == 1:
            mine = _engine.TableRows(mine, np.arange(LENGTH), shape)
        found = both(fused, mine)
        total = sum(gradient(other, shape, np.float32) for other in range(1, size))
        np.testing.assert_array_equal(found, total)
    keras_dist.join()
    assert not rows_travelled  # the others reduce the whole table
