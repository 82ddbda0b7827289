"""The arithmetic of reductions, against numpy."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist import errors
from keras_dist._engine.reduce import ReduceOp, check_dtype, parse_op, reduce_rows

WIDE = {
    ReduceOp.SUM: lambda rows: rows.sum(axis=0),
    ReduceOp.AVERAGE: lambda rows: rows.sum(axis=0) / len(rows),
    ReduceOp.MIN: lambda rows: rows.min(axis=0),
    ReduceOp.MAX: lambda rows: rows.max(axis=0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(axis=0),
}


@pytest.mark.parametrize("op", WIDE)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i4", "i8", ml_dtypes.bfloat16])
def test_equals_numpy_in_high_precision(op, dtype):
    rows = np.random.default_rng(0).integers(-3, 4, (3, 50)).astype(dtype)
    expected = WIDE[op](rows.astype(np.float64))
    if np.issubdtype(dtype, np.integer):
        if op is ReduceOp.AVERAGE and np.issubdtype(dtype, np.unsignedinteger):
            expected = rows.astype(np.uint64).sum(axis=0) // len(rows)
        expected = np.trunc(expected).astype(np.int64)
    result = reduce_rows(rows, op)
    assert result.dtype == rows.dtype
    np.testing.assert_array_equal(result, np.asarray(expected).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_rounded_once(dtype):
    # 1 + 2**-9 + 2**-9 ...: summed in bfloat16 each small term would be lost.
    rows = np.array([[1.0]] + [[2.0**-9]] * 8).astype(dtype)
    assert reduce_rows(rows, ReduceOp.SUM)[0] == np.asarray(1 + 8 * 2.0**-9).astype(dtype)


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_random_float32_sums_follow_rank_order_to_the_bit(ranks, count, seed):
    rows = np.random.default_rng(seed).standard_normal((ranks, count)).astype(np.float32)
    expected = rows[0].copy()
    for row in rows[1:]:
        expected = expected + row
    assert reduce_rows(rows, ReduceOp.SUM).tobytes() == expected.tobytes()


def test_whole_numbers_past_float64_stay_exact():
    rows = np.array([[2**60 + 1], [2**60 + 3]], np.int64)
    assert reduce_rows(rows, ReduceOp.AVERAGE)[0] == 2**60 + 2


def test_average_of_whole_numbers_is_truncated_towards_zero():
    rows = np.array([[-3, 3], [-4, 4]], np.int32)
    np.testing.assert_array_equal(reduce_rows(rows, ReduceOp.AVERAGE), [-3, 3])


def test_booleans_mean_and_and_or():
    rows = np.array([[True, True, False], [True, False, False]])
    np.testing.assert_array_equal(reduce_rows(rows, ReduceOp.MIN), [True, False, False])
    np.testing.assert_array_equal(reduce_rows(rows, ReduceOp.MAX), [True, True, False])
    np.testing.assert_array_equal(reduce_rows(rows, ReduceOp.PRODUCT), [True, False, False])


def test_the_input_is_left_alone():
    rows = np.ones((2, 3), np.float32)
    reduce_rows(rows, ReduceOp.SUM)
    np.testing.assert_array_equal(rows, 1)


def test_infinities_travel_without_a_warning(recwarn):
    rows = np.array([[np.inf], [-np.inf]], np.float32)
    assert np.isnan(reduce_rows(rows, ReduceOp.SUM)[0])
    assert not recwarn.list


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("?", "sum"), ("?", "average"), ("c8", "max"), ("U3", "sum"), ("O", "sum"), ("M8[s]", "min")],
)
def test_an_op_without_a_meaning_is_refused(dtype, op):
    with pytest.raises(errors.ArgumentTypeError, match=r"\[here\] Expected x .* Received: "):
        check_dtype(np.dtype(dtype), ReduceOp(op), "[here]", "x")


def test_ops_have_names():
    assert parse_op("Average") is ReduceOp.AVERAGE
    assert parse_op(ReduceOp.SUM) is ReduceOp.SUM
    with pytest.raises(errors.ArgumentError, match="one of average, sum, min, max, product"):
        parse_op("mean")
