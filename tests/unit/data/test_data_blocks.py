"""Blocks of rows: which windows each rank reads, and how long blocks are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.data.blocks import (
    BlockShard,
    GlobalBlockShard,
    block_length,
    ordered_blocks,
)
from keras_dist.data.partition import plan_samples

few = settings(max_examples=40)
cases = st.tuples(*[st.integers(*limits) for limits in ((4, 120), (1, 4), (1, 9), (1, 20), (1, 5))])
keys = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))


def shares_of(kind, case, key, remainder="drop"):
    """Returns the shard of each rank, and the number of rows of a block."""
    total, size, batch_size, block, align = case
    line = ordered_blocks(total, block * align, align, key)
    plans = [plan_samples(total, size, rank, batch_size, remainder) for rank in range(size)]
    return [kind(line, block * align, plan, key) for plan in plans], block * align


def windows_of(share):
    return [[window for window, _ in share.positions(step)] for step in range(share.plan.steps)]


@few
@given(cases, keys)
def test_a_window_is_one_contiguous_block_and_all_ranks_move_on_in_the_same_step(case, key):
    shares, block = shares_of(BlockShard, case, key)
    for share in shares:
        for window in range(share.rounds):
            pieces = share.pieces(window)
            assert (pieces[:, 1] - pieces[:, 0]).sum() == block
            if key is None:
                first = (window * len(shares) + share.plan.rank) * block
                assert pieces[0, 0] == first
    assert all(windows_of(share) == windows_of(shares[0]) for share in shares)
    whole = [begin for begin, end in shares[0].sequence if end - begin == block]
    assert not np.any(np.mod(whole, case[-1]))


@few
@given(cases, st.sampled_from(["uneven", "pad", "drop"]), st.integers(0, 9))
def test_all_ranks_read_the_windows_of_a_global_order_at_the_same_time(case, remainder, seed):
    shares, _ = shares_of(GlobalBlockShard, case, (seed, 0), remainder)
    assert all(windows_of(share) == windows_of(shares[0]) for share in shares)


@few
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 64))
def test_blocks_are_no_larger_than_they_may_be(total, row_nbytes, batch_size, align):
    block = block_length(total, row_nbytes, batch_size, align, 1 << 20)
    assert block % align == 0 and block >= batch_size
    assert block < max(batch_size, (1 << 20) // row_nbytes, 1) + align
