"""Partition of samples over ranks: complete, disjoint, in equal numbers of steps, in one order."""

import dataclasses

import numpy as np
import pytest
from data_checks import check_files, check_samples, check_union, is_too_short
from hypothesis import given
from hypothesis import strategies as st

from keras_dist.data.partition import (
    EvenPlan,
    Plan,
    RoundRobin,
    Spread,
    order_of,
    plan_after_change,
    plan_round_robin,
    plan_samples,
    plan_spread,
)

SIZES = range(1, 9)
batch_sizes = st.integers(1, 40)
remainders = st.sampled_from(["uneven", "pad", "drop"])
seeds = st.none() | st.integers(0, 5)


@st.composite
def totals_and_sizes(draw):
    size = draw(st.sampled_from(SIZES))
    return draw(st.integers(size, 200)), size


def plans(total, size, batch_size, remainder):
    return [plan_samples(total, size, rank, batch_size, remainder) for rank in range(size)]


def epoch_of(plan, seed, epoch=0):
    order = plan.order(seed, epoch)
    return [order[slice(*plan.bounds(step))] for step in range(plan.steps)]


# --- Fewer ranks than before


@given(totals_and_sizes(), batch_sizes, remainders, st.integers(1, 8))
def test_fewer_ranks_take_as_many_steps_and_share_everything(shape, batch_size, remainder, left):
    total, size = shape
    left = min(left, size)
    first = plans(total, size, batch_size, remainder)[0]
    fewer = [plan_after_change(first, total, left, rank, remainder) for rank in range(left)]
    assert {plan.steps for plan in fewer} == {first.steps}
    parts = [np.concatenate(epoch_of(plan, None)) for plan in fewer]
    for plan, part in zip(fewer, parts, strict=True):
        assert sum(plan.sizes) == plan.count == len(part)
        assert min(plan.sizes) >= 1 and max(plan.sizes) - min(plan.sizes) <= 1
    together = np.concatenate(parts)
    if remainder == "drop":
        assert len(set(map(len, parts))) == 1 and len(set(together)) == len(together)
    else:
        assert set(together) == set(range(total))


# --- Samples


@given(totals_and_sizes(), batch_sizes, remainders, seeds, st.integers(0, 3))
def test_ranks_share_out_samples(shape, batch_size, remainder, seed, epoch):
    all_plans = plans(*shape, batch_size, remainder)
    orders = [plan.order(seed, epoch) for plan in all_plans]
    check_union(np.concatenate(orders).tolist(), shape[0], remainder)
    check_samples([list(plan.sizes) for plan in all_plans], shape[0], batch_size, remainder)
    for plan, order in zip(all_plans, orders, strict=True):
        assert len(order) == plan.count and plan.extra == len(order) - len(set(order))
        assert set(order % plan.size) == {plan.rank}
        assert max(order) < shape[0] - (shape[0] % plan.size if remainder == "drop" else 0)
        assert [len(batch) for batch in epoch_of(plan, seed, epoch)] == list(plan.sizes)


@given(totals_and_sizes(), batch_sizes, remainders, st.data())
def test_a_limited_plan_has_the_first_steps_of_the_whole_one(shape, batch_size, remainder, data):
    for plan in plans(*shape, batch_size, remainder):
        steps = data.draw(st.integers(1, plan.steps))
        limited = plan.limited(steps)
        assert limited.sizes == plan.sizes[:steps]
        if steps < plan.steps:
            assert len(set(limited.order(1, 0))) == limited.count
        if plan.extra == 0:
            assert list(limited.order(1, 0)) == list(plan.order(1, 0)[: limited.count])


def test_batches_are_as_large_as_a_rank_can_fill():
    assert plan_samples(7, 3, 0, 40, "drop") == Plan(0, 3, 2, 2, 1, 2)
    assert plan_samples(15, 3, 0, 2, "drop").extra == 0
    assert plan_samples(12, 3, 2, 2, "pad") == plan_samples(12, 3, 2, 2, "uneven")
    assert plan_samples(14, 3, 0, 2, "uneven").sizes == (2, 3)
    assert plan_samples(14, 3, 0, 2, "uneven").bounds(1) == (2, 5)
    assert plan_samples(14, 3, 0, 2, "uneven").limited(3) == Plan(0, 3, 5, 6, 3, 2)


def test_an_order_is_drawn_from_seed_rank_and_epoch():
    plan = plan_samples(14, 3, 1, 2, "uneven")
    places = np.random.default_rng([7, 1, 4]).permutation(5)
    assert plan.order(7, 4).tolist() == [1 + 3 * place for place in places]
    assert plan.order(0, 4).tolist() != plan.order(None, 4).tolist()


def test_two_ranks_take_over_what_three_were_to_share():
    first = plan_samples(14, 3, 0, 2, "uneven")
    even = [plan_after_change(first, 14, 2, rank, "uneven") for rank in range(2)]
    assert even == [EvenPlan(rank, 2, 7, 7, 2, 2) for rank in range(2)]
    assert [even[0].bounds(step) for step in range(2)] == [(0, 3), (3, 7)]
    early = plan_samples(60, 3, 0, 2, "uneven").limited(4)  # 24 of 60 samples
    cut = plan_after_change(early, 60, 2, 1, "uneven")
    assert (cut.count, cut.steps, cut.sizes) == (12, 4, (3,) * 4)
    odd = plan_after_change(plan_samples(60, 3, 0, 3, "uneven").limited(3), 60, 2, 0, "uneven")
    assert (odd.count, odd.sizes) == (13, (4, 4, 5))  # of 27 samples
    dropped = plan_after_change(plan_samples(14, 3, 0, 2, "drop"), 14, 2, 0, "drop")
    assert (dropped.count, dropped.sizes) == (6, (3, 3))


def test_plans_cannot_be_changed():
    plan = plan_samples(14, 3, 0, 2, "uneven")
    things = (plan, EvenPlan(0, 1, 2, 2, 1, 2), RoundRobin(1, 0, 0, 1), Spread(0, 1, 1, 1, 1, 1, 0))
    for thing in things:
        with pytest.raises(dataclasses.FrozenInstanceError):
            thing.steps = 3


# --- Batches


def dealt_to(deal, rank, size):
    """The batches that a rank takes whole: of full rounds, and repeated ones."""
    whole = list(range(rank, deal.full, size))
    return whole + ([deal.full + rank % deal.repeated] if deal.repeated else [])


@given(st.integers(1, 100), st.sampled_from(SIZES), remainders)
def test_batches_are_dealt_out_in_equally_many_steps(total, size, remainder):
    deal = plan_round_robin(total, size, remainder)
    for rank in range(size):
        assert len(dealt_to(deal, rank, size)) + (deal.pooled > 0) == deal.steps
    taken = {i for rank in range(size) for i in dealt_to(deal, rank, size)}
    taken |= set(range(deal.full, deal.full + deal.pooled))
    assert taken == set(range(total - total % size if remainder == "drop" else total))
    assert not (deal.pooled and deal.repeated)
    # The pool has a batch for every rank whenever there are enough.
    assert deal.pooled == 0 or size < deal.pooled < 2 * size or deal.pooled == total < size


def test_batches_for_three_ranks():
    assert plan_round_robin(11, 3, "uneven") == RoundRobin(6, 5, 0, 3)
    assert plan_round_robin(11, 3, "pad") == RoundRobin(9, 0, 2, 4)
    assert plan_round_robin(2, 3, "uneven") == RoundRobin(0, 2, 0, 1)


# --- Ranks with different numbers of elements


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), batch_sizes, remainders)
def test_held_elements_are_spread_over_equally_many_batches(counts, batch_size, remainder):
    spreads = [plan_spread(counts, rank, batch_size, remainder) for rank in range(len(counts))]
    if is_too_short(counts, batch_size, remainder):
        assert set(spreads) == {None}
        return
    sizes = [list(spread.sizes) for spread in spreads]
    assert [spread.count for spread in spreads] == list(map(sum, sizes))
    check_files(sizes, counts, batch_size, remainder)


def test_a_limited_spread_has_the_first_batches():
    spread = plan_spread([7, 5], 0, 2, "uneven")
    assert spread.sizes == (2, 2, 2, 1) and spread.limited(3).sizes == (2, 2, 2)
    assert spread.limited(3).count == 6
    assert plan_spread([11, 9], 0, 3, "uneven").bounds(2) == (6, 9)


# --- The order of an epoch, and its reproduction in another run

TOTAL, RANKS, SEED = 20, 3, 7


def plan_of(rank):
    return plan_samples(TOTAL, RANKS, rank, 2, "uneven")


def ordered(way, rank, epoch=0, seed=SEED):
    return order_of(way, seed, TOTAL, plan_of(rank), epoch).tolist()


def test_an_order_is_of_the_data_of_the_plan_or_of_all_ranks_in_turn():
    whole = np.random.default_rng([SEED, 4]).permutation(TOTAL).tolist()
    for rank in range(RANKS):
        assert ordered(None, rank, 4) == list(range(rank, TOTAL, RANKS))
        assert ordered("rank", rank, 4) == plan_of(rank).order(SEED, 4).tolist()
        assert ordered("global", rank, 4) == whole[rank::RANKS]


def test_a_rank_draws_from_a_stream_of_its_own_for_each_epoch():
    ranks = np.random.SeedSequence(SEED).spawn(RANKS)
    for rank, of_rank in enumerate(ranks):
        for epoch, stream in enumerate(of_rank.spawn(2)):
            drawn = np.random.default_rng(stream).integers(TOTAL, size=plan_of(rank).count)
            assert ordered("draw", rank, epoch) == drawn.tolist()
