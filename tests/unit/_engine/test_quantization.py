"""Numbers in 8 or 4 bits: the rounding errors are small, and known to the bit."""

import numpy as np
import pytest

from keras_dist._engine.quantization import (
    BLOCK_COUNT,
    CHUNK_BLOCKS,
    LARGEST,
    add_quantized,
    packed_nbytes,
    quantize,
)

COUNTS = [1, BLOCK_COUNT, 1000, BLOCK_COUNT * CHUNK_BLOCKS + 3]


def restored(values, bits):
    packed = np.empty(packed_nbytes(values.size, bits, values.dtype), np.uint8)
    quantize(values, bits, packed)
    total = np.zeros_like(values)
    add_quantized(packed, bits, total)
    error = values.copy()
    add_quantized(packed, bits, error, -1)
    np.testing.assert_array_equal(error, values - total)
    return total


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", COUNTS)
def test_numbers_are_rounded_to_a_share_of_the_largest_of_their_block(count, bits, dtype):
    random = np.random.default_rng(count)
    values = (random.standard_normal(count) * 10 ** random.uniform(-9, 9, count)).astype(dtype)
    found = restored(values, bits)
    for low in range(0, count, BLOCK_COUNT):
        part = slice(low, low + BLOCK_COUNT)
        step = np.abs(values[part]).max() / LARGEST[bits]
        assert np.abs(found[part] - values[part]).max() <= step * 0.501
        assert np.abs(found[part]).max() == pytest.approx(np.abs(values[part]).max(), rel=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_each_integer_is_restored(bits):
    most = LARGEST[bits]
    values = np.zeros(BLOCK_COUNT, np.float32)
    values[: 2 * most + 1] = np.arange(-most, most + 1)
    np.testing.assert_array_equal(restored(values, bits), values)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("largest", [0.0, 1e-45, 3e-44, 1e-38, 3.3e38])
def test_numbers_at_the_ends_of_the_range(bits, largest):
    values = np.linspace(-largest, largest, 300, dtype=np.float32)
    found = restored(values, bits)
    assert np.isfinite(found).all()
    assert np.abs(found - values).max() <= max(largest / LARGEST[bits] * 0.51, 2e-43)


@pytest.mark.parametrize("bits", [8, 4])
def test_they_take_few_bytes(bits):
    assert packed_nbytes(2048**2, bits, np.dtype("float32")) == 2048**2 * bits // 8 * (
        1 + 32 / BLOCK_COUNT / bits
    )
