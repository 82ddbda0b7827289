"""The sums of rows of equal index have the bits of `numpy.add.at`."""

import numpy as np
import pytest

from keras_dist._engine import row_sums
from keras_dist._engine.row_sums import RowGroups

LIMITS = np.iinfo(np.int64)
INDICES = {
    "none": lambda rng: np.zeros(0, np.int64),
    "one": lambda rng: np.array([5]),
    "unique": lambda rng: rng.permutation(3000)[:1000],
    "ascending": lambda rng: np.arange(0, 3000, 3),
    "some twice": lambda rng: rng.integers(0, 1000, 1000),
    "few": lambda rng: rng.integers(0, 3, 2000),
    "skewed": lambda rng: np.minimum(rng.zipf(1.3, 2000), 2**40),
    "negative": lambda rng: rng.integers(-50, 50, 300),
    "int8": lambda rng: rng.integers(-128, 128, 2000).astype(np.int8),
    "int32": lambda rng: rng.choice([-(2**31), -5, 2**31 - 1], 1000).astype(np.int32),
    "runs": lambda rng: np.sort(rng.integers(0, 400, (3, 300))).reshape(-1),
    "a wide table": lambda rng: rng.integers(2**40, 2**40 + 2**20, 2000),
    "extreme": lambda rng: rng.choice([LIMITS.min, -1, 0, LIMITS.max], 1000),
    "unsigned": lambda rng: rng.choice(np.array([0, 7, 2**64 - 1], np.uint64), 1000),
    "narrow": lambda rng: rng.integers(0, 256, 900).astype(np.uint8),
}


def added_at(rows, indices):
    unique, inverse = np.unique(indices, return_inverse=True)
    total = np.zeros((len(unique), rows.shape[1]), rows.dtype)
    np.add.at(total, inverse.reshape(-1), rows)
    return total, unique


def without_negative_zeros(block, part):
    np.add(block, 0, out=block)


@pytest.mark.parametrize("width", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("block_nbytes", [1, 4000, row_sums.BLOCK_NBYTES])
def test_sums_have_the_bits_of_add_at(monkeypatch, width, kind, block_nbytes):
    monkeypatch.setattr(row_sums, "BLOCK_NBYTES", block_nbytes)
    rng = np.random.default_rng(width)
    indices = INDICES[kind](rng)
    rows = (rng.standard_normal((len(indices), width)) * 10).astype(np.float32)
    rows[::3] = -0.0
    expected, unique = added_at(rows, indices)
    groups = RowGroups(indices)
    sums = np.empty_like(expected)
    groups.sum_rows(rows, sums, without_negative_zeros)
    np.testing.assert_array_equal(groups.indices, unique)
    assert groups.indices.dtype == indices.dtype
    assert sums.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float64, np.complex64])
def test_rows_may_lie_anywhere_and_blocks_may_share_memory(monkeypatch, dtype):
    monkeypatch.setattr(row_sums, "BLOCK_NBYTES", 500)
    rng = np.random.default_rng(0)
    indices, places = rng.integers(0, 200, 700), rng.permutation(900)[:700]
    table = (rng.standard_normal((900, 3)) * 50).astype(dtype)
    groups = RowGroups(indices, places)
    found = np.zeros((len(groups), 3), dtype)

    def keep(block, part):
        found[part] = block

    groups.sum_rows(table, np.empty((groups.block_length(table), 3), dtype), keep)
    assert found.tobytes() == added_at(table[places], indices)[0].tobytes()


def test_the_indices_are_a_new_array():
    indices = np.arange(5)
    RowGroups(indices).indices[...] = 7
    np.testing.assert_array_equal(indices, np.arange(5))
