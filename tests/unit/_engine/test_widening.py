"""Which buckets are widened."""

import types

import numpy as np
import pytest

from keras_dist._engine.arithmetic import ReduceOp, is_own_accumulator
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.collectives.cross_node import CrossNodeReduction, Widening
from keras_dist._engine.compression import Compression
from keras_dist._engine.mpi.topology import Links

OPS = [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
SHAPES = [(3, 5), (), (70,)]


def widened(dtype, op):
    """Returns the widening of the only bucket of some arrays; `None` if it has none."""
    dtype = np.dtype(dtype)
    [bucket] = plan_buckets([(shape, dtype) for shape in SHAPES], 2**20)
    return None if is_own_accumulator(dtype, op) else Widening(bucket, op)


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
    assert [op for op in OPS if widened(dtype, op) is not None] == ops


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
