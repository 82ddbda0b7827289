"""The bucket plan: offsets never overlap, are aligned, and cover every array once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keras_dist._engine.buckets import ALIGNMENT, plan_buckets

dtypes = st.sampled_from([np.dtype(t) for t in ("f2", "f4", "f8", "i1", "i8", "c16", "?")])
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
specs = st.lists(st.tuples(shapes, dtypes), max_size=30)


@given(specs, st.integers(1, 4096))
def test_every_array_has_one_place_and_no_two_places_overlap(specs, bucket_nbytes):
    buckets = plan_buckets(specs, bucket_nbytes)
    placed = [slot.index for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(specs)))
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert (slot.shape, bucket.dtype) == specs[slot.index]
            assert slot.offset >= end
            assert slot.offset * bucket.dtype.itemsize % ALIGNMENT == 0
            end = slot.offset + slot.count
        assert bucket.count == end


@given(specs, st.integers(1, 4096))
def test_a_bucket_is_closed_once_it_is_large_enough(specs, bucket_nbytes):
    for bucket in plan_buckets(specs, bucket_nbytes):
        *others, last = bucket.slots
        assert all((s.offset + s.count) * bucket.dtype.itemsize < bucket_nbytes for s in others)
        assert last.offset * bucket.dtype.itemsize <= bucket_nbytes + ALIGNMENT


@given(specs, st.integers(1, 4096), st.integers(1, 4096))
def test_the_first_bucket_may_be_smaller_and_changes_no_other_rule(specs, bucket_nbytes, first):
    for number, bucket in enumerate(plan_buckets(specs, bucket_nbytes, first)):
        limit = min(bucket_nbytes, first) if number == 0 else bucket_nbytes
        *others, _ = bucket.slots
        assert all((s.offset + s.count) * bucket.dtype.itemsize < limit for s in others)


@given(specs, st.integers(1, 4096))
def test_what_is_packed_comes_out_again(specs, bucket_nbytes):
    arrays = [
        np.random.default_rng(0).integers(0, 2, shape).astype(dtype) for shape, dtype in specs
    ]
    for bucket in plan_buckets(specs, bucket_nbytes):
        members = [arrays[slot.index] for slot in bucket.slots]
        for array, unpacked in zip(members, bucket.unpack(bucket.pack(members)), strict=True):
            np.testing.assert_array_equal(array, unpacked)


def test_groups_travel_together_whatever_their_size():
    specs = [((8,), np.dtype("float32"))] * 5 + [((8,), np.dtype("float16"))]
    buckets = plan_buckets(specs, 1, groups=[[0, 3, 5], [4]])
    found = [[slot.index for slot in bucket.slots] for bucket in buckets]
    assert found == [[1], [2], [0, 3], [4], [5]]
