"""Digests and numbers in one message, for any number of nodes; threads stand in for nodes."""

import numpy as np
import pytest
from thread_ranks import Network

from keras_dist._engine.arithmetic import ReduceOp, combine
from keras_dist._engine.mpi.peers import (
    EAGER_NBYTES,
    MAX_PAYLOAD_NBYTES,
    Payload,
    Peers,
    combine_rows,
)

DIGEST, OTHER = b"the same digest.", b"another digest.."
F4 = np.dtype(np.float32)
# In one message, in two, and more than that: as a whole or by halves.
COUNTS = [5, EAGER_NBYTES // 4 + 1, MAX_PAYLOAD_NBYTES // 4, MAX_PAYLOAD_NBYTES // 4 + 7]
LARGE = 50_001  # of its halves, but not of their halves, a part follows in a second message
SIZES = [2, 3, 4, 5, 6, 7, 8, 13]


def row_of(rank, count):
    return np.random.default_rng(rank).standard_normal(count).astype("f4")


def added(low, high):
    total = np.empty_like(low)
    combine(low, high, ReduceOp.SUM, total)
    return total


def compare(rank, count, digest=DIGEST, same=True, row=row_of):
    """Compares digests, with a payload unless `count` is `None`; returns the answer and result."""
    peers = Peers(rank)
    payload = None
    if count is not None:
        mine, result = row(rank.Get_rank(), count), np.full(count, -1, F4)
        legs = peers.legs(count, F4)
        payload = Payload(legs, ReduceOp.SUM, rank.Get_size(), lambda _: mine, result)
    steps = peers.compare(digest, same, payload)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            arrived = payload is not None and payload.arrived
            return stop.value, arrived, None if payload is None else payload.result


@pytest.mark.parametrize("count", [*COUNTS, LARGE])
@pytest.mark.parametrize("size", SIZES)
def test_numbers_arrive_in_the_order_of_the_rounds_in_few_messages(size, count):
    expected = added(*combine_rows([row_of(r, count) for r in range(size)], added))
    expected /= np.float32(size) if size & (size - 1) else 1
    expected *= np.float32(1 if size & (size - 1) else 1 / size)
    network = Network(size)
    for same, arrived, result in network.run(lambda rank: compare(rank, count)):
        assert same and arrived
        assert result.tobytes() == expected.tobytes()
    assert network.is_empty
    # Two messages for each doubling of the number of nodes, and one for the halves.
    has_halves = 4 * count > MAX_PAYLOAD_NBYTES
    assert max(network.messages) <= 2 * (size - 1).bit_length() + has_halves


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_the_sign_of_nan_is_equal_on_all_ranks(size, count, nan):
    def row(rank, count):
        return np.full(count, nan if rank % 2 else -nan, F4)

    answers = Network(size).run(lambda rank: compare(rank, count, row=row))
    assert len({result.tobytes() for _, _, result in answers}) == 1


# What the other rank brings: its digest, whether its node agrees, and its number of elements.
DIFFERENCES = [
    (OTHER, True, None),
    (DIGEST, False, COUNTS[-1]),
    *((OTHER, True, count) for count in [*COUNTS, LARGE, 300_000]),
]


@pytest.mark.parametrize("other", DIFFERENCES)
@pytest.mark.parametrize("count", [None, *COUNTS, LARGE])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_difference_is_known_to_all_and_leaves_nothing(size, count, other):
    for odd in range(size):
        network = Network(size)

        def work(rank, odd=odd):
            if rank.Get_rank() == odd:
                digest, same, number = other
                return compare(rank, number, digest, same)
            return compare(rank, count)

        for number, (same, arrived, result) in enumerate(network.run(work)):
            assert not same and not arrived
            if number != odd and count is not None and size == 2:
                assert (result == -1).all()
        assert network.is_empty


@pytest.mark.parametrize("counts", [(COUNTS[1], LARGE), (LARGE, COUNTS[1]), (LARGE, 300_000)])
def test_nodes_that_split_their_messages_differently_know_it_and_leave_nothing(counts):
    network = Network(4)

    def work(rank):
        count = counts[rank.Get_rank() // 2]
        return compare(rank, count, bytes(15) + bytes([counts.index(count)]))

    assert not any(same or arrived for same, arrived, _ in network.run(work))
    assert network.is_empty
