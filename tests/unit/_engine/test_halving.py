"""Recursive halving: for which arrays, and the number of messages."""

import pytest

from keras_dist._engine.mpi.peers import halving, rounds
from keras_dist._engine.mpi.topology import PAIR_NBYTES, SEGMENT_NBYTES, halving_nbytes


def test_halving_is_for_many_nodes_and_small_arrays():
    assert halving_nbytes(2) == PAIR_NBYTES
    assert halving_nbytes(4) == 4 * SEGMENT_NBYTES and halving_nbytes(64) == 64 * SEGMENT_NBYTES
    # Otherwise some nodes send whole arrays: few nodes send all of them with the digests.
    assert max(halving_nbytes(nodes) for nodes in (3, 5, 100)) < SEGMENT_NBYTES
    assert halving_nbytes(1000) < halving_nbytes(10_000) < 64 * SEGMENT_NBYTES


NUMBERS = [*range(2, 130), 255, 256, 257, 1000, 4096, 10_000]


@pytest.mark.parametrize("size", NUMBERS)
def test_the_messages_of_a_node_grow_logarithmically(size):
    steps = size.bit_length() - 1
    nodes = {*range(min(size, 70)), *range(max(0, size - 3), size)}
    for node in nodes:
        digests = rounds(node, size)
        # The numbers of up to 64 KiB travel with the digests.
        assert sum(step.sends for step in digests) <= steps + 1
        plan = halving(node, size, 100_000)
        plan += [step.reverse for step in reversed(plan)]
        assert sum(step.sent is not None for step in plan) <= 2 * steps + 1
        assert sum(step.received is not None for step in plan) <= 2 * steps + 1
