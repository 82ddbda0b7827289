"""Rounds between nodes: every node hears from all in one order, with few messages."""

import re

import pytest

from keras_dist._engine.mpi.peers import combine_rows, halving, rounds
from keras_dist._engine.mpi.topology import PAIR_NBYTES, SEGMENT_NBYTES, halving_nbytes

NUMBERS = [*range(2, 130), 255, 256, 257, 1000, 4096, 10_000]


def run(contributions, combine):
    """Runs the rounds of all nodes; returns their results, and the number of messages of each."""
    count = len(contributions)
    plans = [rounds(index, count, 1) for index in range(count)]
    values, messages = list(contributions), [0] * count
    has_sent = [False] * count
    while any(plans):
        # A node waits for both messages of a round, so only pairs of first rounds can run.
        ready = [i for i in range(count) if plans[i] and is_mutual(plans, i)]
        assert ready, "the nodes wait for each other"
        before = list(values)
        for index in ready:
            step = plans[index].pop(0)
            messages[index] += step.sent is not None
            if step.received and has_sent[index] and step.sent is None:
                values[index] = before[step.peer]
            elif step.received:
                low, high = sorted((index, step.peer))
                values[index] = combine(before[low], before[high])
            has_sent[index] |= step.sent is not None
    return values, messages


def is_mutual(plans, index):
    """Returns whether the peer of a node's next round expects just this exchange."""
    mine = plans[index][0]
    if not plans[mine.peer]:
        return False
    theirs = plans[mine.peer][0]
    return (theirs.peer, theirs.sent, theirs.received) == (index, mine.received, mine.sent)


@pytest.mark.parametrize("count", [*range(1, 34), 63, 64, 65, 100, 1000])
def test_every_node_combines_each_node_once_in_the_order_of_the_rounds(count):
    names = [str(index) for index in range(count)]

    def combine(low, high):
        return f"({low} {high})"

    results, messages = run(names, combine)
    [result] = set(results)
    assert result == (combine(*combine_rows(names, combine)) if count > 1 else "0")
    assert sorted(re.findall(r"\d+", result)) == sorted(names)
    assert max(messages) <= (count - 1).bit_length() + (count > 1)


def test_halving_is_for_many_nodes_and_small_arrays():
    assert halving_nbytes(2) == PAIR_NBYTES
    assert halving_nbytes(4) == 4 * SEGMENT_NBYTES and halving_nbytes(64) == 64 * SEGMENT_NBYTES
    # Otherwise some nodes send whole arrays: few nodes send all of them with the digests.
    assert max(halving_nbytes(nodes) for nodes in (3, 5, 100)) < SEGMENT_NBYTES
    assert halving_nbytes(1000) < halving_nbytes(10_000) < 64 * SEGMENT_NBYTES


@pytest.mark.parametrize("size", NUMBERS)
def test_the_messages_of_a_node_grow_logarithmically(size):
    steps = size.bit_length() - 1
    nodes = {*range(min(size, 70)), *range(max(0, size - 3), size)}
    for node in nodes:
        digests = rounds(node, size, 1)
        # The numbers of up to 64 KiB travel with the digests.
        assert sum(step.sent is not None for step in digests) <= steps + 1
        plan = halving(node, size, 100_000)
        plan += [step.reverse for step in reversed(plan)]
        assert sum(step.sent is not None for step in plan) <= 2 * steps + 1
        assert sum(step.received is not None for step in plan) <= 2 * steps + 1
