"""Slices that travel between nodes: their memory, those without elements, and their dtype."""

import gc
import types
import weakref

import numpy as np
import pytest

from keras_dist._engine.arithmetic import ReduceOp
from keras_dist._engine.buckets import plan_buckets
from keras_dist._engine.collectives.cross_node import CrossNodeReduction, slice_payload
from keras_dist._engine.compression import Compression
from keras_dist._engine.mpi.peers import Payload
from keras_dist._engine.shm.bucket_reduction import Sliced

F4 = np.dtype(np.float32)
SMALL = 1000  # elements


def test_a_payload_is_freed_at_once():
    # Not by the garbage collector, which may run long after a bucket: it refers to its arrays.
    def payload_of(number, load, result, count):
        return Payload(None, ReduceOp.SUM, 1, load, result, is_slice=True)

    cross_node = types.SimpleNamespace(payload=payload_of)
    gc.disable()
    try:
        sums = np.empty(0)
        reduction = types.SimpleNamespace(count=0, reduce_published=lambda: (sums, sums))
        payload = slice_payload(cross_node, 0, reduction)
        payload.load(payload)
        is_there = weakref.ref(payload)
        del payload
        assert is_there() is None
    finally:
        gc.enable()


def test_an_empty_slice_cannot_fail():
    # No other node would hear of it: its rank has no peers.
    def scratch(nbytes, name=""):
        if name:
            raise MemoryError(name)
        return np.empty(nbytes, np.uint8)

    [bucket] = plan_buckets([((SMALL,), F4)], 4 * SMALL)
    node = types.SimpleNamespace(rank=1, size=2, scratch=scratch)
    slices = [Sliced(node, bucket, ReduceOp.SUM, count, 3) for count in (1, 2)]
    for reduction in slices:
        reduction._rows = types.SimpleNamespace(next=0, choose=lambda: 1)
    sums, result = slices[0].reduce_published()
    assert sums.size == result.size == 0
    with pytest.raises(MemoryError):
        slices[1].reduce_published()


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
        halving_nbytes=2**21,
    )
    factor = 2  # both have twice the bytes if they are widened
    for count in (64 * 1024 // (factor * np.dtype(dtype).itemsize), 100_000):
        [bucket] = plan_buckets([((slices * count,), np.dtype(dtype))], 2**30)
        found = CrossNodeReduction(comm, [bucket], ReduceOp.AVERAGE, Compression.none)
        assert bool(found.widened) == (count < 100_000 or slices >= factor)
