"""Slices that travel with digests, for any nodes; threads stand in for ranks."""

import gc
import threading
import types
import weakref

import numpy as np
import pytest
from thread_ranks import Network, Rank

from keras_dist._engine.arithmetic import ReduceOp, combine
from keras_dist._engine.buckets import plan_buckets, slice_bounds
from keras_dist._engine.collectives.payloads import slice_payload
from keras_dist._engine.collectives.rendezvous import PAYLOAD_ALONE
from keras_dist._engine.mpi.digests import DigestExchange
from keras_dist._engine.mpi.peers import MAX_PAYLOAD_NBYTES, Payload
from keras_dist._engine.rounds import combine_rows
from keras_dist._engine.shm.bucket_reduction import Sliced

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
    """The threads of a node: a barrier that compares digests, and the memory of a result.

    It holds the contribution of the node until the result is written.
    """

    def __init__(self, size, row):
        self.barrier, self.digests = threading.Barrier(size), [b""] * size
        self.result = row

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
        self.nodes = [Node(size, row_of(n, count)) for n, size in enumerate(layout)]
        self.answers = {}

    @property
    def has_result(self):
        """Whether all nodes have the sum, to the bit."""
        rows = [row_of(n, self.count) for n in range(len(self.layout))]
        expected = added(*combine_rows(rows, added))
        return {node.result.tobytes() for node in self.nodes} == {expected.tobytes()}

    def run(self, digests=None, failing=None, again=False):
        """Compares digests on all ranks; `digests` and `failing` differ by (node, local rank).

        Args:
            digests: those of some ranks. Defaults to equal ones.
            failing: a rank that cannot reduce its slice. Defaults to none.
            again: whether the slices travel once more, as after a difference that is no error.
        """
        places = [(n, r) for n, size in enumerate(self.layout) for r in range(size)]
        digests = digests or {}

        def work(place):
            digest = digests.get(place, DIGEST)
            self.answers[place] = self.compare(*place, digest, place == failing, again)

        threads = [threading.Thread(target=work, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(self.answers) == len(places)

    def compare(self, number, local_rank, digest, fails, again):
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
        same = exchange.compare(digest, payload)
        if again:
            assert not same and not payload.arrived
            same = exchange.compare(PAYLOAD_ALONE, payload)
        return same, payload

    def payload(self, exchange, number, local_rank, fails):
        part, legs = slice(0, 0), None
        if local_rank < self.slices:
            part = slice(*self.bounds[local_rank : local_rank + 2])
            legs = exchange.peers.legs(part.stop - part.start, F4)

        def load(payload):
            if fails:
                payload.failure = MemoryError()
                return None
            np.copyto(payload.partial, payload.result)
            return payload.partial

        result = self.nodes[number].result[part]
        return Payload(legs, ReduceOp.SUM, 1, load, result, np.empty_like(result), is_slice=True)

    @property
    def is_quiet(self):
        """Whether every message has been received."""
        return all(network.is_empty for network in self.networks)


@pytest.mark.parametrize("count", [1, SMALL, LARGE])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_nodes_have_the_sum_after_few_messages(layout, count):
    job = Job(layout, count)
    job.run()
    assert all(same and payload.arrived for same, payload in job.answers.values())
    assert job.has_result
    assert job.is_quiet
    doublings = (len(layout) - 1).bit_length()
    for network in job.networks:
        assert 0 < max(network.messages) <= 2 * doublings + (count == LARGE)


UNEQUAL = [[2, 2], [2, 1], [3, 2, 4], [2, 2, 2, 2, 2]]


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("layout", UNEQUAL, ids=str)
def test_a_difference_is_known_to_all_and_writes_no_result(layout, count):
    for place in [(n, r) for n, size in enumerate(layout) for r in range(size)]:
        job = Job(layout, count)
        job.run(digests={place: OTHER})
        assert not any(same or payload.arrived for same, payload in job.answers.values())
        assert job.is_quiet
        for number, node in enumerate(job.nodes):
            assert (node.result == row_of(number, count)).all()


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("layout", UNEQUAL, ids=str)
def test_slices_travel_again_after_a_difference(layout, count):
    for place in [(n, r) for n, size in enumerate(layout) for r in range(size)]:
        job = Job(layout, count)
        job.run(digests={place: OTHER}, again=True)
        assert all(same and payload.arrived for same, payload in job.answers.values())
        assert job.has_result
        assert job.is_quiet


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("layout", UNEQUAL, ids=str)
def test_a_slice_that_one_rank_cannot_reduce_is_known_to_all(layout, count):
    for place in [(n, r) for n in range(len(layout)) for r in range(min(layout))]:
        job = Job(layout, count)
        job.run(failing=place)
        assert not any(same or payload.arrived for same, payload in job.answers.values())
        assert job.is_quiet


def test_a_payload_is_freed_at_once():
    # Not by the garbage collector, which may run long after a bucket: it refers to its arrays.
    def payload_of(number, load, result, count):
        return Payload(None, ReduceOp.SUM, 1, load, result, is_slice=True)

    cross_node = types.SimpleNamespace(payload=payload_of)
    gc.disable()
    try:
        sums = np.empty(0)
        reduction = types.SimpleNamespace(count=0, reduce_published=lambda: (sums, sums))
        payload = slice_payload(cross_node, 0, reduction)
        payload.load(payload)
        is_there = weakref.ref(payload)
        del payload
        assert is_there() is None
    finally:
        gc.enable()


def test_an_empty_slice_cannot_fail():
    # No other node would hear of it: its rank has no peers.
    def scratch(nbytes, name=""):
        if name:
            raise MemoryError(name)
        return np.empty(nbytes, np.uint8)

    [bucket] = plan_buckets([((SMALL,), F4)], 4 * SMALL)
    node = types.SimpleNamespace(rank=1, size=2, scratch=scratch)
    slices = [Sliced(node, bucket, ReduceOp.SUM, count, 3) for count in (1, 2)]
    for reduction in slices:
        reduction._rows = types.SimpleNamespace(next=0, choose=lambda: 1)
    sums, result = slices[0].reduce_published()
    assert sums.size == result.size == 0
    with pytest.raises(MemoryError):
        slices[1].reduce_published()
