"""Rounds between nodes: every node hears from all, and all sums have the same order."""

import pytest

from keras_dist._engine.mpi.peers import combine_rows, rounds

COUNTS = [*range(2, 34), 63, 64, 65, 100, 1000]


def run(contributions, combine):
    """Runs the rounds of all nodes; returns their results, and the number of messages of each."""
    count = len(contributions)
    plans = [rounds(index, count) for index in range(count)]
    values, messages = list(contributions), [0] * count
    has_sent = [False] * count
    while any(plans):
        # A node waits for both messages of a round, so only pairs of first rounds can run.
        ready = [i for i in range(count) if plans[i] and is_mutual(plans, i)]
        assert ready, "the nodes wait for each other"
        before = list(values)
        for index in ready:
            step = plans[index].pop(0)
            messages[index] += step.sends
            if step.receives and has_sent[index] and not step.sends:
                values[index] = before[step.peer]
            elif step.receives:
                low, high = sorted((index, step.peer))
                values[index] = combine(before[low], before[high])
            has_sent[index] |= step.sends
    return values, messages


def is_mutual(plans, index):
    """Returns whether the peer of a node's next round expects just this exchange."""
    mine = plans[index][0]
    if not plans[mine.peer]:
        return False
    theirs = plans[mine.peer][0]
    return (theirs.peer, theirs.sends, theirs.receives) == (index, mine.receives, mine.sends)


@pytest.mark.parametrize("count", COUNTS)
def test_every_node_hears_from_each_node_once(count):
    results, messages = run([(index,) for index in range(count)], lambda a, b: a + b)
    assert {tuple(sorted(result)) for result in results} == {tuple(range(count))}
    assert max(messages) <= (count - 1).bit_length() + 1


@pytest.mark.parametrize("count", COUNTS)
def test_rows_are_combined_in_the_order_of_the_rounds(count):
    names = [str(index) for index in range(count)]

    def combine(low, high):
        return f"({low} {high})"

    results, _ = run(names, combine)
    assert set(results) == {combine(*combine_rows(names, combine))}


def test_a_single_node_has_no_rounds():
    assert rounds(0, 1) == []
