"""The exact order of samples, and its reproduction in another run."""

import dataclasses

import numpy as np
import pytest

from keras_dist.data.order import Order
from keras_dist.data.partition import plan_samples

TOTAL, SIZE, SEED = 20, 3, 7


def plan(rank):
    return plan_samples(TOTAL, SIZE, rank, 2, "uneven")


def epoch_of(way, rank, epoch=0, seed=SEED):
    return Order(way, seed, TOTAL).of(plan(rank), epoch).tolist()


@pytest.mark.parametrize("rank", range(SIZE))
def test_without_a_way_the_order_is_that_of_the_data(rank):
    assert epoch_of(None, rank, 4) == list(range(rank, TOTAL, SIZE))


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_has_the_order_of_its_plan(rank):
    assert epoch_of("rank", rank, 4) == plan(rank).order(SEED, 4).tolist()


def test_ranks_take_turns_in_a_global_order():
    whole = np.random.default_rng([SEED, 4]).permutation(TOTAL).tolist()
    assert [epoch_of("global", rank, 4) for rank in range(SIZE)] == [
        whole[rank::SIZE] for rank in range(SIZE)
    ]


def test_a_rank_draws_from_a_stream_of_its_own_for_each_epoch():
    ranks = np.random.SeedSequence(SEED).spawn(SIZE)
    for rank, of_rank in enumerate(ranks):
        for epoch, stream in enumerate(of_rank.spawn(2)):
            drawn = np.random.default_rng(stream).integers(TOTAL, size=plan(rank).count)
            assert epoch_of("draw", rank, epoch) == drawn.tolist()


@pytest.mark.parametrize("way", ["rank", "global", "draw"])
def test_an_order_is_of_its_seed_and_epoch(way):
    assert epoch_of(way, 1, 2) == epoch_of(way, 1, 2)
    assert epoch_of(way, 1, 2) != epoch_of(way, 1, 3)
    assert epoch_of(way, 1, 2) != epoch_of(way, 1, 2, seed=SEED + 1)


def test_a_global_order_and_none_do_not_know_the_ranks():
    ways = ("rank", "global", "draw", None)
    assert [Order(way, SEED, TOTAL).knows_ranks for way in ways] == [True, False, True, False]


def test_an_order_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Order(None, SEED, TOTAL).seed = 1
    assert Order(None, SEED, TOTAL) == Order(None, SEED, TOTAL)
