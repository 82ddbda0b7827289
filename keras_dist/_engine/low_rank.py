"""Matrices as products of two narrow ones, and the largest elements of arrays. Pure.

What every rank computes from the same bytes must have the same bits on every processor. Such
functions use additions, multiplications, divisions and square roots of numpy, element by element or
along one axis, whose order is fixed; BLAS has a kernel for each processor.
"""

import math

import numpy as np

BLOCK_COUNT = 2**15  # elements that stay in the cache of a core
SAMPLE_COUNT = 2**14


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns rows and columns of the matrix of an array whose sides have the least sum."""
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1)]
    return min(splits, key=sum)


def first_basis(columns: int, rank: int, dtype: np.dtype, step: int = 0) -> np.ndarray:
    """Returns the columns onto which a matrix is projected at first; equal on all ranks."""
    # Uniform numbers: those of a normal distribution come from functions that differ in last bits.
    drawn = np.random.default_rng([columns, rank, step]).random((columns, rank)) - 0.5
    return drawn.astype(dtype)


def add_error(gradient: np.ndarray, error: np.ndarray, total: np.ndarray) -> bool:
    """Writes the sum of flat arrays to another; returns whether all elements are finite."""
    is_finite = True
    for low in range(0, total.size, BLOCK_COUNT):
        part = slice(low, low + BLOCK_COUNT)
        np.add(gradient[part], error[part], out=total[part])
        is_finite = is_finite and bool(np.isfinite(total[part]).all())
    return is_finite


def orthonormal(matrix: np.ndarray) -> np.ndarray:
    """Returns an orthonormal basis of columns, zero where dependent, alike on every processor."""
    columns = np.ascontiguousarray(matrix.T, np.float64)
    largest = np.abs(columns).max(initial=0.0)
    if largest == 0:
        return np.zeros_like(matrix)
    columns /= largest
    least = 16 * float(np.finfo(matrix.dtype).eps)
    for number, column in enumerate(columns):
        before, length = columns[:number], _length(column)
        for _ in range(2):  # once leaves rounding errors of nearly dependent columns
            dots = (before * column).sum(axis=1)
            column -= (before * dots[:, np.newaxis]).sum(axis=0)
        rest = _length(column)
        column[...] = column / rest if rest > least * length else 0.0
    return columns.T.astype(matrix.dtype)


def _length(column: np.ndarray) -> float:
    return math.sqrt((column * column).sum())


def next_basis(shared: np.ndarray, step: int) -> np.ndarray:
    """Returns the basis for the next step; in place of dependent columns others are drawn."""
    basis = orthonormal(shared)
    is_lost = ~basis.any(axis=0)
    return np.where(is_lost, first_basis(len(basis), basis.shape[1], basis.dtype, step + 1), basis)


def split(
    total: np.ndarray, left: np.ndarray, own: np.ndarray, shared: np.ndarray, error: np.ndarray
) -> None:
    """Divides a matrix into what all ranks apply, written in its place, and the error of this one.

    `own` is the product of the transposed matrix of this rank and the orthonormal `left`, `shared`
    that of all ranks, reduced; its product with `left` has the same bits on every processor.
    """
    rights = np.ascontiguousarray(shared.T)
    height = max(1, BLOCK_COUNT // total.shape[1])
    product = np.empty((min(height, len(total)), total.shape[1]), total.dtype)
    for low in range(0, len(total), height):
        part, of_left = total[low : low + height], left[low : low + height]
        scratch = product[: len(part)]
        np.matmul(of_left, own.T, out=scratch)
        np.subtract(part, scratch, out=error[low : low + height])
        np.multiply(of_left[:, :1], rights[0], out=part)
        for number in range(1, len(rights)):
            np.multiply(of_left[:, number : number + 1], rights[number], out=scratch)
            np.add(part, scratch, out=part)


def places_of_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the ascending places of elements of largest magnitude in a flat, finite array."""
    if count >= values.size:
        return np.arange(values.size)
    magnitudes = np.abs(values)
    candidates = _candidates(magnitudes, count)
    found = magnitudes if candidates is None else magnitudes[candidates]
    places = np.argpartition(found, found.size - count)[found.size - count :]
    return np.sort(places if candidates is None else candidates[places])


def _candidates(magnitudes: np.ndarray, count: int) -> np.ndarray | None:
    """Returns places with those of the largest elements, found by a bound from a sample, if few."""
    sample = magnitudes[:: magnitudes.size // SAMPLE_COUNT | 1]
    wanted = int(1.25 * count / magnitudes.size * sample.size) + 32
    if magnitudes.size < 4 * SAMPLE_COUNT or wanted >= sample.size // 2:
        return None
    bound = np.partition(sample, sample.size - wanted)[sample.size - wanted]
    found = np.flatnonzero(magnitudes >= bound)
    return found if found.size >= count else None
