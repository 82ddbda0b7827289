"""Rows of results: no rank writes what another still holds, and all choose alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist._engine.shm.region import ResultRows

FLOAT = np.dtype(np.float32)


class Lease:
    """Lends row numbers, which a test holds."""

    def __init__(self):
        self.rows = set()

    @property
    def held(self):
        return sum(1 << row for row in self.rows)

    def lend(self, row, count, dtype):
        return row


def node(size, count):
    """Returns the rows as each rank of a node sees them, and their leases."""
    words, leases = np.zeros((size, 8), np.uint64), [Lease() for _ in range(size)]
    return [ResultRows(count, words, rank, lease) for rank, lease in enumerate(leases)], leases


def call(ranks):
    """Makes a call of all ranks; returns the row of its result."""
    for rank in ranks:
        rank.announce()
    [row] = {rank.advance() for rank in ranks}
    assert len({(rank.next, rank.is_crowded) for rank in ranks}) == 1
    return row


@given(st.integers(1, 3), st.integers(3, 6), st.data())
def test_no_row_that_is_held_is_written(size, count, data):
    ranks, leases = node(size, count)
    before, was_crowded = None, False
    for _ in range(data.draw(st.integers(1, 25))):
        row = call(ranks)
        assert not any(row in lease.rows for lease in leases)
        assert row != before or was_crowded
        before, was_crowded = row, ranks[0].is_crowded
        for rank, lease in zip(ranks, leases, strict=True):
            lent = rank.lend(1, FLOAT)
            assert lent == (None if was_crowded else row)
            if lent is not None and data.draw(st.booleans()):
                lease.rows.add(lent)
            for held in sorted(lease.rows):
                if data.draw(st.integers(0, 3)) == 0:
                    lease.rows.discard(held)


def test_a_script_that_assigns_each_result_to_the_same_name_is_lent_all():
    ranks, leases = node(2, 3)
    for _ in range(9):
        row = call(ranks)
        for rank, lease in zip(ranks, leases, strict=True):
            assert rank.lend(1, FLOAT) == row
            lease.rows = {row}


def test_a_script_that_drops_each_result_uses_two_rows():
    ranks, _ = node(2, 6)
    assert [call(ranks) for _ in range(6)] == [0, 1] * 3


@pytest.mark.parametrize("holder", [0, 1])
def test_results_are_lent_again_when_those_that_were_held_are_dropped(holder):
    ranks, leases = node(2, 3)
    for _ in range(5):
        call(ranks)
        lent = ranks[holder].lend(1, FLOAT)
        if lent is not None:
            leases[holder].rows.add(lent)
    assert ranks[0].is_crowded and ranks[1].lend(1, FLOAT) is None
    leases[holder].rows.clear()
    row = call(ranks)
    assert ranks[0].lend(1, FLOAT) == ranks[1].lend(1, FLOAT) == row
