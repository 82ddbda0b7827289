"""The arithmetic of reductions, against numpy."""

import contextvars
import fractions

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist import errors
from keras_dist._engine.arithmetic import (
    ReduceOp,
    accumulator,
    check_dtype,
    check_factors,
    check_sum,
    combine_into,
    divide,
    is_own_accumulator,
    parse_factor,
    parse_op,
    reduce_each,
    reduce_into,
    reduce_rows,
    scaled,
    silencer,
)

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


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@given(ranks=st.integers(1, 7), data=st.data())
def test_averages_of_integers_are_exact_whatever_their_sum(dtype, ranks, data):
    limits = np.iinfo(dtype)
    near = [limits.min, limits.min + 1, limits.min // 2, limits.max // 2 + 1, limits.max]
    number = st.sampled_from(near) | st.integers(limits.min, limits.max)
    rows = data.draw(st.lists(st.tuples(number, number), min_size=ranks, max_size=ranks))
    sums = [sum(column) for column in zip(*rows, strict=True)]
    means = [abs(total) // ranks * (1 if total > 0 else -1) for total in sums]
    found = reduce_rows(np.array(rows, dtype), ReduceOp.AVERAGE)
    assert found.dtype == dtype and found.tolist() == means


def test_sums_of_integers_beyond_float64_are_divided_exactly():
    for dtype, sign in ((np.int64, 1), (np.int64, -1), (np.uint64, 1)):
        total = np.array([sign * 3 * (2**60 + 1)], dtype)
        divide(total, 3)
        assert total[0] == sign * (2**60 + 1)


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_the_sign_of_nan_is_that_of_a_new_array_also_in_place(nan):
    left, right = np.array([nan], np.float32), np.array([-nan], np.float32)
    expected = (left + right).tobytes()
    combine_into(left, right, ReduceOp.SUM, left)
    assert left.tobytes() == expected


def test_infinities_and_overflow_give_no_warning(recwarn):
    rows = np.array([[np.inf], [-np.inf]], np.float32)
    assert np.isnan(reduce_rows(rows, ReduceOp.SUM)[0])
    assert np.isinf(scaled(np.array([1e30], np.float32), 1e30))
    assert not recwarn.list


def test_an_average_is_a_division_to_the_bit():
    rows = np.random.default_rng(1).standard_normal((9, 500)).astype(np.float32)
    for count in range(1, 10):
        total = rows[:count].sum(axis=0)
        divide(total, count)
        np.testing.assert_array_equal(total, rows[:count].sum(axis=0) / np.float32(count))


@pytest.mark.parametrize("op", WIDE)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16])
def test_one_rank_gets_its_contribution(op, dtype):
    row = np.array([1, -2, 300], dtype)
    result = np.zeros(3, dtype)
    reduce_into(result, [row], op)
    assert result.tobytes() == row.tobytes()


def test_parts_may_reuse_their_memory():
    def parts():
        memory = np.empty((2, 2), np.float16)
        for number in range(5):
            memory[number % 2] = [number, 2 * number]
            yield memory[number % 2]

    results = np.zeros((3, 2), np.float16)
    reduce_each(((result, parts()) for result in results), results.dtype, ReduceOp.AVERAGE)
    np.testing.assert_array_equal(results, [[2, 4]] * 3)


# Those of an average and of a sum, and which of the two need nothing wider.
ACCUMULATORS = {
    "float16": ("float32", "float32", []),
    "bfloat16": ("float32", "float32", []),
    "float8_e4m3fn": ("float32", "float32", []),
    "float32": ("float32", "float32", ["average", "sum"]),
    "float64": ("float64", "float64", ["average", "sum"]),
    "longdouble": ("longdouble", "longdouble", ["average", "sum"]),
    "complex64": ("complex64", "complex64", ["average", "sum"]),
    "int8": ("int64", "int8", ["sum"]),
    "int64": ("int64", "int64", ["sum"]),
    "uint8": ("uint64", "uint8", ["sum"]),
    "uint64": ("uint64", "uint64", ["sum"]),
    "bool": ("bool", "bool", ["average", "sum"]),
}


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_accumulators_have_these_dtypes(name):
    dtype, (*accumulators, own) = np.dtype(name), ACCUMULATORS[name]
    ops = (ReduceOp.AVERAGE, ReduceOp.SUM)
    assert [accumulator(dtype, op) for op in ops] == [*map(np.dtype, accumulators)]
    assert [op.value for op in ops if is_own_accumulator(dtype, op)] == own
    assert is_own_accumulator(dtype, ReduceOp.MAX) == ("sum" in own)


# --- Valid pairs of op and dtype

NUMBERS = {"average", "sum", "min", "max", "product"}
MEANINGS = {
    "bool": {"min", "max", "product"},
    "int8": NUMBERS,
    "uint64": NUMBERS,
    "complex64": {"average", "sum", "product"},
    "float16": {*NUMBERS, "adasum"},
    "float64": {*NUMBERS, "adasum"},
    "bfloat16": {*NUMBERS, "adasum"},
    "float8_e4m3fn": {*NUMBERS, "adasum"},
    "U3": set(),
    "O": set(),
    "V4": set(),
    "f4,f4": set(),
    "M8[s]": set(),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_ops_are_defined_for_these_dtypes_only(name):
    def refused(op):
        try:
            check_dtype(np.dtype(name), op, "[here]", "x")
        except errors.ArgumentTypeError:
            return True
        return False

    assert {op.value for op in ReduceOp if not refused(op)} == MEANINGS[name]


# --- Factors


@pytest.mark.parametrize("factor", [2, 0.5, fractions.Fraction(1, 4), np.float32(3), np.array(7)])
def test_a_factor_is_any_finite_real_number(factor):
    parsed = parse_factor(factor, "prescale_factor", "[here]")
    assert type(parsed) is float and parsed == float(factor)


@pytest.mark.parametrize(
    ("factor", "kind", "received"),
    [
        (1j, errors.ArgumentTypeError, "1j of type complex"),
        (np.ones(1), errors.ArgumentTypeError, r"array\(\[1\.\]\) of type ndarray"),
        (float("nan"), errors.ArgumentError, "nan"),
    ],
)
def test_other_factors_are_refused(factor, kind, received):
    expected = rf"\[here\] Expected f to be a finite number\. Received: {received}\."
    with pytest.raises(kind, match=expected):
        parse_factor(factor, "f", "[here]")


@pytest.mark.parametrize("factors", [(1, 1), (2.0, 1), (1, 2.0), (2.0, 2.0), (0.5, 1), (0.5, 0.5)])
def test_booleans_and_text_take_no_factors(factors):
    check_factors(np.dtype("float32"), *factors, "[here]", "x")
    check_factors(np.dtype("complex64"), *factors, "[here]", "x")
    for dtype in map(np.dtype, ("bool", "U1")):
        if factors == (1, 1):
            check_factors(dtype, *factors, "[here]", "x")
            continue
        with pytest.raises(errors.ArgumentTypeError, match=r"Expected x .* multiply\. Received: "):
            check_factors(dtype, *factors, "[here]", "x")


def test_a_product_keeps_the_dtype():
    floats = np.array([1, 3, 5], np.float32)
    assert scaled(floats, 1) is floats
    for dtype, factor, wanted in (
        ("float32", 0.5, [0.5, 1.5, 2.5]),
        ("float64", 2.0, [2, 6, 10]),
        ("int32", 0.5, [0, 1, 2]),
        ("int8", -0.5, [0, -1, -2]),
        ("complex64", 2.0, [2, 6, 10]),
        ("bfloat16", 0.25, [0.25, 0.75, 1.25]),
    ):
        array = floats.astype(dtype)
        product = scaled(array, factor)
        assert product.dtype == array.dtype
        np.testing.assert_array_equal(product, np.asarray(wanted).astype(dtype))
        np.testing.assert_array_equal(array, floats.astype(dtype))


def test_integers_are_multiplied_in_float64_and_narrow_floats_in_float32():
    assert scaled(np.array(2**24 + 1), 3.0) == 3 * (2**24 + 1)
    narrow = np.arange(1, 2000).astype(np.float16)
    wanted = (narrow.astype(np.float32) * np.float32(1 / 3)).astype(np.float16)
    np.testing.assert_array_equal(scaled(narrow, 1 / 3), wanted)
    assert (wanted != narrow * np.float16(1 / 3)).any()
    assert scaled(np.zeros((), np.float16), 2.0).shape == ()


def test_rows_can_only_be_summed():
    for op in ReduceOp:
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            check_sum(op, "[here]", "sparse_allreduce", "Look.")
            continue
        text = rf"Expected op to be Average or Sum in f\. Received: {op.value}\. Look\."
        with pytest.raises(errors.ArgumentError, match=text):
            check_sum(op, "[here]", "f", "Look.")


def test_ops_have_names():
    assert parse_op("Average") is ReduceOp.AVERAGE
    assert parse_op(ReduceOp.SUM) is ReduceOp.SUM
    for wrong in ("mean", None, 1):
        with pytest.raises(errors.ArgumentError, match=rf"max, product, adasum\. .*: {wrong!r}\."):
            parse_op(wrong)


@pytest.mark.parametrize("version", [np.__version__, "1.26.4", "10.0.0"])
@pytest.mark.parametrize("setting", ["raise", "ignore"])
def test_numpy_does_not_warn_of_infinities_and_keeps_its_settings(monkeypatch, version, setting):
    if np.__version__.startswith("1.") and not version.startswith("1."):
        pytest.skip("the settings of numpy 1 are not those of a context")
    monkeypatch.setattr(np, "__version__", version)
    with np.errstate(all=setting):
        before = np.geterr()
        silent = silencer()
        out = np.array([3e38], np.float32)
        silent(np.add, out, out, out)
        assert out == np.inf and np.geterr() == before
    uses_a_context = isinstance(getattr(silent, "__self__", None), contextvars.Context)
    assert uses_a_context != version.startswith("1.")
