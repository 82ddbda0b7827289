"""The bucket plan: offsets never overlap, are aligned, and cover every array once."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist._engine.buckets import (
    ALIGNMENT,
    Bucket,
    BucketRange,
    Slot,
    aligned_array,
    plan_buckets,
    size_class,
    slice_bounds,
)

dtypes = st.sampled_from([np.dtype(t) for t in ("f2", "f4", "f8", "i1", "i8", "c16", "?")])
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
specs = st.lists(st.tuples(shapes, dtypes), max_size=30)


@given(specs, st.integers(1, 4096), st.none() | st.integers(1, 4096))
def test_every_array_has_one_slot_of_buckets_that_are_closed_in_time(specs, nbytes, first):
    arrays = [
        np.random.default_rng(0).integers(0, 2, shape).astype(dtype) for shape, dtype in specs
    ]
    buckets = plan_buckets(specs, nbytes, first)
    placed = [slot.index for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(specs)))
    for number, bucket in enumerate(buckets):
        end, itemsize = 0, bucket.dtype.itemsize
        for slot in bucket.slots:
            assert (slot.shape, bucket.dtype) == specs[slot.index]
            assert slot.offset >= end
            assert slot.offset * itemsize % ALIGNMENT == 0
            end = slot.offset + slot.count
        assert bucket.count == end
        limit = nbytes if number or first is None else min(nbytes, first)
        *others, last = bucket.slots
        assert all((slot.offset + slot.count) * itemsize < limit for slot in others)
        assert last.offset * itemsize <= limit + ALIGNMENT
        members = [arrays[slot.index] for slot in bucket.slots]
        for array, unpacked in zip(members, bucket.unpack(bucket.pack(members)), strict=True):
            np.testing.assert_array_equal(array, unpacked)


def test_a_bucket_is_closed_at_the_byte_and_the_first_one_earlier():
    specs = [((16,), np.dtype("float32"))] * 7
    assert places(plan_buckets(specs, 128)) == [[0, 1], [2, 3], [4, 5], [6]]
    assert places(plan_buckets(specs, 129)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert places(plan_buckets(specs, 192, 64)) == [[0], [1, 2, 3], [4, 5, 6]]
    assert places(plan_buckets(specs, 64, 192)) == [[0], [1], [2], [3], [4], [5], [6]]
    grouped = [*specs[:5], ((8,), np.dtype("float16"))]  # whatever the size of a group
    assert places(plan_buckets(grouped, 1, groups=[[0, 3, 5], [4]])) == [[1], [2], [0, 3], [4], [5]]


def test_large_arrays_may_have_buckets_of_their_own():
    counts = [4, 64, 8, 32, 200, 16]
    specs = [((count,), np.dtype("float32")) for count in counts]
    assert places(plan_buckets(specs, 256)) == [[0, 1], [2, 3, 4], [5]]
    # A bucket is placed where its last array is: it is complete when that has been computed.
    assert places(plan_buckets(specs, 256, alone=True)) == [[1], [0, 2, 3], [4], [5]]
    assert places(plan_buckets(specs, 257, alone=True)) == [[0, 1], [4], [2, 3, 5]]
    assert places(plan_buckets(specs, 256, groups=[[1, 2]], alone=True)) == [[4], [0, 3, 5], [1, 2]]
    assert places(plan_buckets(specs, 256, tables=[2, 3])) == [[0, 1], [2], [3], [4], [5]]
    alone = [bucket for bucket in plan_buckets(specs, 256, alone=True) if len(bucket.slots) == 1]
    assert [(bucket.slots[0].offset, bucket.count) for bucket in alone] == [
        (0, 64),
        (0, 200),
        (0, 16),
    ]


def places(buckets):
    """The arrays of each bucket."""
    return [[slot.index for slot in bucket.slots] for bucket in buckets]


def test_arrays_start_on_the_next_cache_line():
    odd = np.dtype("S24")  # of three cache lines for eight
    offsets = {}
    for dtype in map(np.dtype, ("int8", "float32", "complex128", odd, "S64", "S128")):
        (bucket,) = plan_buckets([((1,), dtype), ((9,), dtype), ((), dtype)], 10**6)
        offsets[dtype.itemsize] = [slot.offset for slot in bucket.slots] + [bucket.count]
        assert bucket.nbytes == bucket.count * dtype.itemsize
    assert offsets == {
        1: [0, 64, 128, 129],
        4: [0, 16, 32, 33],
        16: [0, 4, 16, 17],
        24: [0, 8, 24, 25],
        64: [0, 1, 10, 11],
        128: [0, 1, 10, 11],
    }


def test_a_plan_cannot_be_changed():
    (bucket,) = plan_buckets([((1,), np.dtype("f4"))], 1)
    for thing in (bucket, bucket.slots[0]):
        with pytest.raises(AttributeError):
            thing.count = 2
    with pytest.raises(ValueError, match="zip"):
        bucket.pack([])


def test_arrays_are_views_of_a_buffer_with_zeros_between():
    arrays = [np.ones((2, 3), "f4"), np.ones(5, "f4"), np.ones((), "f4"), np.ones((1, 1), "f4")]
    (bucket,) = plan_buckets([(a.shape, a.dtype) for a in arrays], 10**6)
    buffer = bucket.pack(arrays)
    assert buffer.shape == (49,) and buffer.sum() == 13
    for array, part in zip(arrays, bucket.unpack(buffer), strict=True):
        assert part.shape == array.shape and np.shares_memory(part, buffer)


def test_gaps_are_cleared_and_nothing_else():
    float32 = np.dtype("float32")
    slots = [Slot(0, (3,), 0, 3), Slot(1, (4, 4), 16, 16), Slot(2, (2,), 32, 2)]
    buffer = np.arange(1, 35, dtype=float32)
    expected = np.where((buffer > 3) & (buffer < 17), 0, buffer)
    bucket = Bucket(float32, tuple(slots), 34)
    assert bucket.clear_gaps(buffer) is buffer
    np.testing.assert_array_equal(buffer, expected)


def test_sizes_of_memory_have_steps_of_4_kib_or_an_eighth():
    sizes = {0: 1, 1: 1, 4096: 1, 4097: 2, 32769: 9, 65536: 16, 65537: 18, 2**20 + 1: 288}
    assert {nbytes: size_class(nbytes) // 4096 for nbytes in sizes} == sizes


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16", "S24"])
def test_new_arrays_begin_on_a_cache_line(dtype):
    kept = [aligned_array(count, np.dtype(dtype)) for count in range(1, 40)]
    for count, array in enumerate(kept, start=1):
        assert array.shape == (count,) and array.dtype == dtype
        assert array.ctypes.data % ALIGNMENT == 0
        assert array.base.nbytes == array.nbytes + ALIGNMENT
    assert not aligned_array(99, np.dtype("f4"), np.zeros).any()


def test_slices_of_ranks_begin_on_cache_lines():
    assert slice_bounds(100, 2, 4) == [0, 48, 100]  # 7 lines of 16
    assert slice_bounds(100, 3, 4) == [0, 32, 64, 100]
    assert slice_bounds(96, 3, 4) == [0, 32, 64, 96]
    assert slice_bounds(10, 4, 4) == [0, 0, 0, 0, 10]
    assert slice_bounds(100, 2, 1) == [0, 64, 100]
    assert slice_bounds(7, 2, 64) == [0, 3, 7]
    assert slice_bounds(7, 2, 128) == [0, 3, 7]
    assert slice_bounds(13, 2, 24) == [0, 6, 13]  # 2 in a line
    assert {type(bound) for bound in slice_bounds(100, 3, 4)} == {int}
    assert slice_bounds(0, 2, 4) == [0, 0, 0]


# --- Pieces

SLOTS = (
    *(Slot(0, (2,), 0, 2), Slot(1, (0,), 5, 0), Slot(2, (3,), 5, 3)),
    *(Slot(3, (1,), 10, 1), Slot(4, (2,), 14, 2)),
)


def test_a_piece_is_a_range_of_the_buffer_and_a_view_within_one_array():
    bucket = Bucket(np.dtype("f4"), SLOTS, 16)
    arrays = [np.arange(1, slot.count + 1, dtype="f4") for slot in SLOTS]
    for low, high in itertools.combinations_with_replacement(range(17), 2):
        piece, scratch = BucketRange(bucket, low, high), np.full(16, -1, "f4")
        got = piece.of(arrays, scratch)
        assert len(piece) == len(got) == high - low
        np.testing.assert_array_equal(got, bucket.pack(arrays)[low:high])
        own = [s.index for s in SLOTS if s.offset <= low < high <= s.offset + s.count]
        assert low == high or np.shares_memory(got, arrays[own[0]] if own else scratch)
