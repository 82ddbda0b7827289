"""Widened buckets, against the reduction of the narrow ones."""

import itertools
import types

import ml_dtypes
import numpy as np
import pytest

from keras_dist._engine.arithmetic import ReduceOp, combine, divide, reduce_rows
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.collectives.cross_node import CrossNodeReduction
from keras_dist._engine.collectives.widening import widenings
from keras_dist._engine.compression import Compression
from keras_dist._engine.mpi.links import Links

OPS = [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
SHAPES = [(3, 5), (), (70,)]


def widened(dtype, op):
    """Returns the only bucket of some arrays, and its widening, if it has one."""
    dtype = np.dtype(dtype)
    [bucket] = plan_buckets([(shape, dtype) for shape in SHAPES], 2**20)
    return bucket, widenings([bucket], op).get(0)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [*itertools.product([np.float16, ml_dtypes.bfloat16], OPS)]
    + [(dtype, ReduceOp.AVERAGE) for dtype in (np.int8, np.uint32, np.int64, np.uint64)],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_narrow_result_has_the_bits_of_the_reduction_of_the_narrow_arrays(dtype, op, ranks):
    bucket, widening = widened(dtype, op)
    random = np.random.default_rng(0)
    rows = [
        [(random.standard_normal(shape) * 100).astype(np.int8).astype(dtype) for shape in SHAPES]
        for _ in range(ranks)
    ]
    total, *others = [widening.widen(arrays).copy() for arrays in rows]
    assert total.shape == (widening.bucket.count,)
    assert total.dtype == widening.bucket.dtype
    for other in others:
        combine(total, other, op, total)
    if op is ReduceOp.AVERAGE and not widening.divides:
        divide(total, ranks)
    before = total.copy()
    results = bucket.unpack(widening.narrow(total, ranks))
    np.testing.assert_array_equal(total, before)
    for index, result in enumerate(results):
        narrow = np.stack([arrays[index].reshape(-1) for arrays in rows])
        assert result.dtype == dtype
        assert result.tobytes() == reduce_rows(narrow, op).tobytes()


def test_an_average_of_the_smallest_integers_does_not_overflow():
    bucket, widening = widened(np.int64, ReduceOp.AVERAGE)
    arrays = [np.full(shape, np.iinfo(np.int64).min) for shape in SHAPES]
    result = widening.narrow(3 * widening.widen(arrays), 3)
    for found, array in zip(bucket.unpack(result), arrays, strict=True):
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        (np.float32, []),
        (np.complex64, []),
        (np.bool_, []),
        (np.int32, [ReduceOp.AVERAGE]),
        (np.uint64, [ReduceOp.AVERAGE]),
        (np.int64, [ReduceOp.AVERAGE]),
        (np.float16, OPS),
    ],
)
def test_other_buckets_stay_as_they_are(dtype, ops):
    assert [op for op in OPS if widened(dtype, op)[1] is not None] == ops


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_a_slice_over_64_kib_is_widened_only_if_that_saves_bytes(slices, dtype):
    topology = types.SimpleNamespace(slices=slices, is_homogeneous=True)
    comm = types.SimpleNamespace(
        topology=topology,
        digests=types.SimpleNamespace(carries=True),
        is_one_node=False,
        node=object(),
        reduction="ordered",
        links=Links(halving_nbytes=2**21),
    )
    factor = 2  # both have twice the bytes if they are widened
    for count in (64 * 1024 // (factor * np.dtype(dtype).itemsize), 100_000):
        [bucket] = plan_buckets([((slices * count,), np.dtype(dtype))], 2**30)
        found = CrossNodeReduction(comm, [bucket], ReduceOp.AVERAGE, Compression.none)
        assert bool(found.widened) == (count < 100_000 or slices >= factor)
