"""Narrow matrices and largest elements, and that nothing of a gradient is lost."""

import numpy as np
import pytest

from keras_dist import errors
from keras_dist._engine.compression import Compression, parse_gradient_compression
from keras_dist._engine.gradient_compression import PowerSGD, TopK
from keras_dist._engine.low_rank import (
    BLOCK_COUNT,
    add_error,
    first_basis,
    matrix_shape,
    next_basis,
    orthonormal,
    places_of_largest,
    split,
)

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((30, 7), (30, 7)),
        ((3, 3, 64, 128), (576, 128)),
        ((128, 64, 3, 3), (128, 576)),
        ((512, 8, 64), (512, 512)),
        ((0, 4), (1, 0)),
    ],
)
def test_a_gradient_is_the_matrix_whose_sides_are_most_alike(shape, matrix):
    assert matrix_shape(shape) == matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
def test_columns_are_orthonormal_or_zero(dtype, scale):
    matrix = np.random.default_rng(0).standard_normal((200, 6)).astype(dtype)
    matrix[:, 3] = matrix[:, 0] - 2 * matrix[:, 1]  # depends on others
    matrix[:, 5] = 0
    basis = orthonormal(matrix * dtype(scale))
    assert basis.dtype == dtype
    wanted = np.diag([1, 1, 1, 0, 1, 0])
    np.testing.assert_allclose(basis.T @ basis, wanted, atol=1e-6)
    np.testing.assert_allclose(basis @ (basis.T @ matrix), matrix, atol=1e-4)
    assert not orthonormal(np.zeros((4, 2), dtype)).any()


def test_lost_columns_are_drawn_anew():
    shared = np.zeros((50, 3), np.float32)
    shared[:, 0] = 2.0
    basis = next_basis(shared, step=4)
    np.testing.assert_allclose(basis[:, 0], 1 / np.sqrt(50), rtol=1e-6)
    assert np.linalg.matrix_rank(basis) == 3
    assert not np.array_equal(basis[:, 1:], next_basis(shared, step=5)[:, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(60, 40), (40, 3 * BLOCK_COUNT // 7), (3 * BLOCK_COUNT // 7, 40)]
)
def test_what_is_applied_and_what_is_left_add_up(shape, dtype):
    rng = np.random.default_rng(0)
    every = [rng.standard_normal(shape).astype(dtype) for _ in range(3)]
    basis = first_basis(shape[1], 4, np.dtype(dtype))
    left = orthonormal(np.mean([matrix @ basis for matrix in every], axis=0))
    rights = [matrix.T @ left for matrix in every]
    shared = np.mean(rights, axis=0)
    left_over, applied = [], []
    for matrix, own in zip(every, rights, strict=True):
        total, error = matrix.copy(), np.empty_like(matrix)
        split(total, left, own, shared, error)
        left_over.append(error)
        applied.append(total)
    assert len({total.tobytes() for total in applied}) == 1
    np.testing.assert_allclose(applied[0], left @ shared.T, atol=1e-5)
    found = applied[0] + np.mean(left_over, axis=0)
    np.testing.assert_allclose(found, np.mean(every, axis=0), atol=1e-5)


@pytest.mark.parametrize("place", [None, 0, BLOCK_COUNT + 3])
def test_the_sum_with_the_error_says_whether_it_is_finite(place):
    gradient = np.ones(BLOCK_COUNT + 4, np.float32)
    if place is not None:
        gradient[place] = np.nan
    total = np.empty_like(gradient)
    assert add_error(gradient, np.full_like(gradient, 2), total) == (place is None)
    np.testing.assert_array_equal(total, gradient + 2)


@pytest.mark.parametrize("size", [1, 100, 200_000])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "equal", "sparse"])
def test_the_places_of_the_largest_elements(size, ratio, kind):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    if kind == "equal":
        values[:] = -1
    elif kind == "sparse":
        values[np.arange(size) % 1000 != 0] = 0
    count = max(1, int(ratio * size))
    places = places_of_largest(values, count)
    assert len(np.unique(places)) == count
    assert (np.diff(places) > 0).all()
    wanted = np.sort(np.abs(values))[size - count :]
    np.testing.assert_array_equal(np.sort(np.abs(values[places])), wanted)


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("powersgd", PowerSGD()),
        ("PowerSGD(rank=2)", PowerSGD(rank=2)),
        ("topk(ratio=0.5, start_step=3)", TopK(3, 0.5)),
        ("topk(ratio=0.5)", TopK(0, np.float64(0.5))),
    ],
)
def test_compressions_have_names(name, compression):
    assert parse_gradient_compression(name, "[test]") == compression
    assert parse_gradient_compression(compression.name, "[test]") == compression
    assert parse_gradient_compression("fp16", "[test]") is Compression.fp16


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("powersgd(rank=0)", errors.ArgumentError, "rank to be an integer, 1 or more"),
        ("powersgd(rank=1.5)", errors.ArgumentTypeError, "rank to be an integer"),
        ("powersgd(min_compression_rate=0)", errors.ArgumentError, "above 0"),
        ("topk(ratio=0)", errors.ArgumentError, "ratio to be a number above 0 and at most 1"),
        ("topk(ratio=1.1)", errors.ArgumentError, "at most 1"),
        ("topk(start_step=-1)", errors.ArgumentError, "start_step"),
        ("powersgd(", errors.ArgumentError, "powersgd with its options by their"),
        ("topk(0.5)", errors.ArgumentError, "topk with its options by their"),
        ("topk(ratio=)", errors.ArgumentError, "topk with its options by their"),
        ("powersgd(ratio=1)", errors.ArgumentError, "powersgd with its options by their"),
        (Compression.topk, errors.ArgumentTypeError, r"Pass keras_dist.Compression.topk\(\)"),
    ],
)
def test_names_and_options_are_checked(given, error, text):
    with pytest.raises(error, match=text):
        parse_gradient_compression(given, "[test]")


def test_a_ratio_is_a_number():
    with pytest.raises(errors.ArgumentError, match="at most 1"):
        Compression.topk(float("nan"))
    with pytest.raises(errors.ArgumentTypeError, match="ratio to be a number"):
        Compression.topk(True)
