"""Recursive halving: for which arrays, and the number of messages."""

import numpy as np
import pytest

from keras_dist._engine.mpi.halving import PAIR_NBYTES, SEGMENT_NBYTES, crossover
from keras_dist._engine.rounds import halving, rounds


def test_halving_is_for_many_nodes_and_small_arrays():
    costs = {"latency": 10e-6, "message": 3e-6, "byte": 1e-9}
    assert crossover(2, **costs) == PAIR_NBYTES
    assert crossover(3, **costs) == crossover(4, **costs) == 0
    assert crossover(64, **costs) == 64 * SEGMENT_NBYTES
    assert 0 < crossover(65, **costs) < crossover(100, **costs) < crossover(1000, **costs)
    assert crossover(1000, **{**costs, "byte": 0.0}) == 1000 * SEGMENT_NBYTES


@pytest.mark.parametrize("nodes", [20, 65, 100, 1000, 10_000])
def test_at_the_crossover_both_take_as_long(nodes):
    latency, message, byte = 10e-6, 3e-6, 1e-9
    size, steps = crossover(nodes, latency, message, byte), int(np.log2(nodes))
    by_halves = 2 * (steps + 1) * latency + (4 - 2 / 2**steps) * size * byte
    messages, numbers = 2 * (nodes - 2) * message, 2 * (1 - 1 / nodes) * size * byte
    assert by_halves == pytest.approx(2 * latency + max(messages, numbers), rel=1e-3)


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
