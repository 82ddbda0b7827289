"""Partition of blocks of rows over ranks: the index arithmetic."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dist.data.blocks import (
    BlockShard,
    GlobalBlockShard,
    block_length,
    ordered_blocks,
    remaining_shard,
    rows_of,
    unread_pieces,
)
from keras_dist.data.partition import plan_after_change, plan_samples

few = settings(max_examples=40)
sizes = st.integers(1, 4)
keys = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9)))


def shares_of(total, size, batch_size, block, align, remainder, key):
    line = ordered_blocks(total, block * align, align, key)
    return [
        BlockShard(line, block * align, plan_samples(total, size, rank, batch_size, remainder), key)
        for rank in range(size)
    ]


def batch(share, step):
    """The rows of a step, in order."""
    return [
        row for window, places in share.positions(step) for row in handed_out(share, window, places)
    ]


def handed_out(share, window, places):
    order = share.order(window)
    return rows_of(share.pieces(window))[places if order is None else order[places]].tolist()


def epoch(share):
    last = share.first_step + share.plan.steps
    return [batch(share, step) for step in range(share.first_step, last)]


def flat(batches):
    return [row for rows in batches for row in rows]


remainders = st.sampled_from(["uneven", "pad", "drop"])
cases = st.tuples(
    st.integers(4, 120), sizes, st.integers(1, 9), st.integers(1, 20), st.integers(1, 5)
)


@few
@given(cases, remainders, keys)
def test_the_parts_are_the_whole(case, remainder, key):
    total, size, *_ = case
    shares = shares_of(*case, remainder, key)
    epochs = [epoch(share) for share in shares]
    assert len({len(batches) for batches in epochs}) == 1
    for share, batches in zip(shares, epochs, strict=True):
        assert [len(rows) for rows in batches] == share.plan.sizes()
        assert min(share.plan.sizes()) > 0
    mine = [set(flat(batches)) for batches in epochs]
    handed_out = [row for batches in epochs for row in flat(batches)]
    if remainder == "pad":
        assert set(handed_out) == set(range(total))
        assert len(handed_out) == -(-total // size) * size
    else:
        assert len(set(handed_out)) == len(handed_out) == sum(map(len, mine))
        assert len(handed_out) == (
            total if remainder == "uneven" else len(epochs[0][0]) * size * len(epochs[0])
        )


@few
@given(cases, keys)
def test_a_window_is_one_contiguous_block_and_all_ranks_move_on_in_the_same_step(case, key):
    _, size, _, block, align = case
    shares = shares_of(*case, "drop", key)
    for share in shares:
        for window in range(share.rounds):
            pieces = share.pieces(window)
            assert (pieces[:, 1] - pieces[:, 0]).sum() == block * align
            if key is None:
                assert rows_of(pieces)[0] == (window * size + share.plan.rank) * block * align
    seen = [
        [window for s in range(share.plan.steps) for window, _ in share.positions(s)]
        for share in shares
    ]
    assert all(windows == seen[0] for windows in seen)
    whole = [p for p in shares[0].sequence if p[1] - p[0] == block * align]
    assert all(begin % align == 0 for begin, _ in whole)


@few
@given(cases, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_the_order_of_blocks_is_one_for_any_number_of_ranks(case, key):
    total, _, batch_size, block, align = case
    lines = [
        shares_of(total, n, batch_size, block, align, "uneven", key)[0].sequence for n in (1, 4)
    ]
    assert np.array_equal(*lines)


def global_shares_of(total, size, batch_size, block, remainder, key=(1, 2)):
    return [
        GlobalBlockShard(
            ordered_blocks(total, block, 1, key),
            block,
            plan_samples(total, size, rank, batch_size, remainder),
            key,
        )
        for rank in range(size)
    ]


@few
@given(cases, remainders, st.data())
def test_a_global_order_is_one_for_any_number_of_ranks(case, remainder, data):
    total, size, batch_size, block, _ = case
    shares = global_shares_of(total, size, batch_size, block, remainder)
    epochs = [epoch(share) for share in shares]
    assert [list(map(len, batches)) for batches in epochs] == [s.plan.sizes() for s in shares]
    [alone] = map(epoch, global_shares_of(total, 1, batch_size * size, block, "uneven"))
    steps = [[row for rows in step for row in rows] for step in zip(*epochs, strict=True)]
    assert sorted(flat(alone)) == list(range(total))
    last = len(steps) - 1 if remainder != "drop" or batch_size <= total // size else 0
    assert all(set(steps[k]) == set(alone[k]) for k in range(last))
    if remainder != "drop":
        assert set(flat(steps)) == set(range(total))
        assert len(flat(steps)) == (total if remainder == "uneven" else -(-total // size) * size)
    else:
        assert len(set(flat(steps))) == len(flat(steps))
    # All ranks read the same windows in a step, so collective reads are possible.
    windows = [[[w for w, _ in s.positions(k)] for k in range(last + 1)] for s in shares]
    assert all(each == windows[0] for each in windows)
    # The rest of dead ranks goes to the remaining ranks.
    step = data.draw(st.integers(0, shares[0].plan.steps - 1))
    line = unread_pieces(shares, step)
    left = sorted(rows_of(line))
    if remainder == "uneven":
        assert left == sorted(flat(steps[step:]))
    for fewer in range(1, size):
        if len(left) >= fewer:
            rest = [remaining_shard(shares[0], line, rank, fewer, step) for rank in range(fewer)]
            assert sorted(row for share in rest for row in flat(epoch(share))) == left


@few
@given(cases, remainders, keys, st.data())
def test_what_the_dead_have_left_goes_to_those_that_live(case, remainder, key, data):
    size = case[1]
    shares = shares_of(*case, remainder, key)
    step = data.draw(st.integers(0, shares[0].plan.steps - 1))
    # Ranks that died before they trained on their last batch.
    behind = data.draw(st.sets(st.integers(0, size - 1))) if step else set()
    line = unread_pieces(shares, step, behind)
    done = [(share, step - (rank in behind)) for rank, share in enumerate(shares)]
    read = {row for share, steps in done for s in range(steps) for row in batch(share, s)}
    due = {row for share in shares for row in flat(epoch(share))}
    assert set(rows_of(line).tolist()) == due - read
    assert len(rows_of(line)) == len(set(rows_of(line).tolist()))
    fewer = data.draw(st.integers(1, size))
    rest = [remaining_shard(shares[0], line, rank, fewer, step) for rank in range(fewer)]
    if len(rows_of(line)) < fewer:
        return
    epochs = [epoch(share) for share in rest]
    assert sorted(row for batches in epochs for row in flat(batches)) == sorted(rows_of(line))
    assert {len(batches) for batches in epochs} == {shares[0].plan.steps - step}
    # And again when another rank dies.
    later = data.draw(st.integers(step, shares[0].plan.steps - 1))
    again = rows_of(unread_pieces(rest, later)).tolist()
    read = {row for share in rest for s in range(step, later) for row in batch(share, s)}
    assert set(again) == set(rows_of(line).tolist()) - read


@few
@given(cases, remainders, keys)
def test_the_next_epochs_of_fewer_ranks(case, remainder, key):
    total, size, batch_size, *_ = case
    shares = shares_of(*case, remainder, key)
    fewer = max(1, size - 1)
    first = plan_samples(total, size, 0, batch_size, remainder)
    new = [
        dataclasses.replace(shares[0], plan=plan_after_change(first, total, fewer, rank, remainder))
        for rank in range(fewer)
    ]
    rows = [row for share in new for row in flat(epoch(share))]
    if remainder == "uneven":
        assert sorted(rows) == list(range(total))
    assert len({share.plan.steps for share in new}) == 1


@few
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 64))
def test_blocks_are_no_larger_than_they_may_be(total, row_nbytes, batch_size, align):
    block = block_length(total, row_nbytes, batch_size, align, 1 << 20)
    assert block % align == 0 and block >= batch_size
    assert block < max(batch_size, (1 << 20) // row_nbytes, 1) + align


def test_two_epochs_differ_and_two_runs_do_not():
    def rows(epoch_number):
        return flat(epoch(shares_of(200, 2, 8, 4, 2, "uneven", (3, epoch_number))[1]))

    assert rows(0) == rows(0) != rows(1)
