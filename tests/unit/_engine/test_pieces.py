"""Pieces of a reduction: their sizes, and the order of their messages."""

import pytest

from keras_dist._engine.mpi.reduction import PIECE_NBYTES, SMALLEST_NBYTES, Pieces, piece_nbytes


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_at_each_place_in_the_order_every_rank_receives_once(ranks):
    plans = [Pieces(rank, ranks, 100, 10) for rank in range(ranks)]
    for place in range(ranks - 1):
        assert {plan.receivers[place] for plan in plans} == set(range(ranks))
    assert all(sorted([*plan.senders, rank]) == [*range(ranks)] for rank, plan in enumerate(plans))


def test_pieces_of_many_ranks_are_small_but_not_tiny():
    sizes = [piece_nbytes(ranks, 2**40) for ranks in (2, 8, 64, 10_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == SMALLEST_NBYTES


@pytest.mark.parametrize(("mib", "expected"), [(1, 1), (2, 1), (16, 1), (17, 2), (50, 4), (100, 7)])
def test_a_segment_has_as_few_pieces_as_memory_allows(mib, expected):
    nbytes = mib * 2**20
    size = piece_nbytes(2, nbytes)
    assert Pieces(0, 2, nbytes // 4, size // 4).count == expected
    assert size <= PIECE_NBYTES


@pytest.mark.parametrize(("mib", "expected"), [(1, 1), (2, 1), (4, 2), (8, 4), (16, 4), (100, 25)])
def test_pieces_overlap_on_slow_links(mib, expected):
    nbytes = mib * 2**20
    size = piece_nbytes(2, nbytes, links_are_slow=True)
    assert Pieces(0, 2, nbytes // 4, size // 4).count == expected


def test_pieces_of_many_ranks_are_no_larger_on_slow_links():
    for ranks in (2, 8, 64, 10_000):
        assert piece_nbytes(ranks, 2**30, True) <= piece_nbytes(ranks, 2**30)
