"""Slices that travel with digests, for any nodes; threads stand in for ranks."""

import threading
import types

import numpy as np
import pytest
from thread_ranks import Network, Rank

from keras_dist._engine.arithmetic import ReduceOp, combine
from keras_dist._engine.buckets import slice_bounds
from keras_dist._engine.mpi.digests import DigestExchange
from keras_dist._engine.mpi.peers import MAX_PAYLOAD_NBYTES, Payload
from keras_dist._engine.rounds import combine_rows

DIGEST, OTHER = b"the same digest.", b"another digest.."
F4 = np.dtype(np.float32)
SMALL, LARGE = 1000, MAX_PAYLOAD_NBYTES  # elements: as a whole, and by halves
# Numbers of ranks on each node.
LAYOUTS = [
    *([each] * nodes for nodes in range(2, 17) for each in (1, 2)),
    [2, 1],
    [1, 3, 2],
    [2, 3, 3, 2, 4],
    [1] + 6 * [2],
    [3, 1] * 8,
]


def row_of(number, count):
    return np.random.default_rng(number).standard_normal(count).astype(F4)


def added(low, high):
    total = np.empty_like(low)
    combine(low, high, ReduceOp.SUM, total)
    return total


class Node:
    """The threads of a node: a barrier that compares digests, and the memory of a result."""

    def __init__(self, size, count):
        self.barrier, self.digests = threading.Barrier(size), [b""] * size
        self.result = np.full(count, -1, F4)

    def meet_as(self, local_rank):
        def meet(digest):
            self.digests[local_rank] = digest
            self.barrier.wait()
            same = len(set(self.digests)) == 1
            self.barrier.wait()
            return same

        return meet


class Job:
    """Threads that are the ranks of several nodes. The sum of a node is a row of random numbers."""

    def __init__(self, layout, count):
        self.layout, self.count, self.slices = layout, count, min(layout)
        self.bounds = slice_bounds(count, self.slices, F4.itemsize)
        self.networks = [Network(len(layout)) for _ in range(self.slices)]
        self.nodes = [Node(size, count) for size in layout]
        self.answers = {}

    def run(self, digests=None, failing=None):
        """Compares digests on all ranks; `digests` and `failing` differ by (node, local rank)."""
        places = [(n, r) for n, size in enumerate(self.layout) for r in range(size)]
        digests = digests or {}

        def work(place):
            digest = digests.get(place, DIGEST)
            self.answers[place] = self.compare(*place, digest, place == failing)

        threads = [threading.Thread(target=work, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(self.answers) == len(places)

    def compare(self, number, local_rank, digest, fails):
        node, has_slice = self.nodes[number], local_rank < self.slices
        topology = types.SimpleNamespace(
            is_one_node=False,
            has_slice=has_slice,
            is_homogeneous=len(set(self.layout)) == 1,
            nodes=self.layout,
            size=sum(self.layout),
            world=self,
            across=Rank(self.networks[local_rank], number) if has_slice else None,
        )
        memory = types.SimpleNamespace(meet=node.meet_as(local_rank))
        exchange = DigestExchange(topology, memory, lambda: None)
        assert exchange.carries
        payload = self.payload(exchange, number, local_rank, fails)
        return exchange.compare(digest, payload), payload

    def payload(self, exchange, number, local_rank, fails):
        part, legs = slice(0, 0), None
        if local_rank < self.slices:
            part = slice(*self.bounds[local_rank : local_rank + 2])
            legs = exchange.peers.legs(part.stop - part.start, F4)

        def load():
            if fails:
                made.failure = MemoryError()
                return None
            return row_of(number, self.count)[part]

        result = self.nodes[number].result[part]
        made = Payload(legs, ReduceOp.SUM, 1, load, result, np.empty_like(result), is_slice=True)
        return made

    @property
    def is_quiet(self):
        """Whether every message has been received."""
        return all(network.is_empty for network in self.networks)


@pytest.mark.parametrize("count", [1, SMALL, LARGE])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_nodes_have_the_sum_after_two_messages_for_each_doubling(layout, count):
    job = Job(layout, count)
    job.run()
    assert all(same and payload.arrived for same, payload in job.answers.values())
    expected = added(*combine_rows([row_of(n, count) for n in range(len(layout))], added))
    assert {node.result.tobytes() for node in job.nodes} == {expected.tobytes()}
    assert job.is_quiet
    doublings = (len(layout) - 1).bit_length()
    for network in job.networks:
        assert 0 < max(network.messages) <= 2 * doublings


UNEQUAL = [[2, 2], [2, 1], [3, 2, 4], [2, 2, 2, 2, 2]]


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("layout", UNEQUAL, ids=str)
def test_a_difference_is_known_to_all_and_writes_no_result(layout, count):
    for place in [(n, r) for n, size in enumerate(layout) for r in range(size)]:
        job = Job(layout, count)
        job.run(digests={place: OTHER})
        assert not any(same or payload.arrived for same, payload in job.answers.values())
        assert job.is_quiet
        if len(layout) == 2:
            assert all((node.result == -1).all() for node in job.nodes)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("layout", UNEQUAL, ids=str)
def test_a_slice_that_one_rank_cannot_reduce_is_known_to_all(layout, count):
    for place in [(n, r) for n in range(len(layout)) for r in range(min(layout))]:
        job = Job(layout, count)
        job.run(failing=place)
        assert not any(same or payload.arrived for same, payload in job.answers.values())
        assert job.is_quiet
