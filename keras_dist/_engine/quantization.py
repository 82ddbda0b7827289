"""Numbers in 8 or 4 bits, with a scale for each block: the same bits on every processor. Pure."""

from collections.abc import Iterator

import numpy as np

BLOCK_COUNT = 256  # numbers with one scale
CHUNK_BLOCKS = 128  # that stay in the cache of a core
LARGEST = {8: 127, 4: 7}  # integers, by their bits

Chunk = tuple[slice, np.ndarray, np.ndarray]


def packed_nbytes(count: int, bits: int, dtype: np.dtype) -> int:
    """Returns the number of bytes of quantized numbers."""
    return -(-count // BLOCK_COUNT) * (dtype.itemsize + BLOCK_COUNT * bits // 8)


def quantize(values: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Writes the quantized numbers of a flat array, all finite, to an array of bytes."""
    most = LARGEST[bits]
    for part, scales, codes in _chunks(values, bits, packed):
        blocks = np.zeros((len(scales), BLOCK_COUNT), values.dtype)
        given = values[part]
        blocks.reshape(-1)[: given.size] = given
        scales[...] = np.abs(blocks).max(axis=1) / most
        # The scale of a block of zeros is zero, and those of tiny numbers are inexact.
        blocks /= np.where(scales > 0, scales, 1)[:, np.newaxis]
        integers = np.clip(np.rint(blocks, out=blocks), -most, most).astype(np.int8)
        if bits == 4:
            low, high = np.split(integers, 2, axis=1)
            integers = (low & 15) | (high << 4)
        codes[...] = integers


def add_quantized(packed: np.ndarray, bits: int, total: np.ndarray, factor: int = 1) -> None:
    """Adds quantized numbers, times 1 or -1, to a flat array."""
    for part, scales, codes in _chunks(total, bits, packed):
        integers = codes
        if bits == 4:
            integers = np.concatenate([(codes << 4) >> 4, codes >> 4], axis=1)
        numbers = integers * (factor * scales)[:, np.newaxis]
        target = total[part]
        target += numbers.reshape(-1)[: target.size]


def _chunks(values: np.ndarray, bits: int, packed: np.ndarray) -> Iterator[Chunk]:
    """Yields parts of an array of numbers, with their scales and integers in the bytes."""
    count = -(-values.size // BLOCK_COUNT)
    scales = packed[: count * values.itemsize].view(values.dtype)
    codes = packed[scales.nbytes :].view(np.int8).reshape(count, BLOCK_COUNT * bits // 8)
    for low in range(0, count, CHUNK_BLOCKS):
        blocks = slice(low, low + CHUNK_BLOCKS)
        part = slice(low * BLOCK_COUNT, (low + CHUNK_BLOCKS) * BLOCK_COUNT)
        yield part, scales[blocks], codes[blocks]
