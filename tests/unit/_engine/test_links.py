"""What is concluded from the times of messages between nodes."""

import math
import threading
import time
import types

import numpy as np
import pytest
from thread_ranks import Network, Rank

from keras_dist._engine.mpi import topology
from keras_dist._engine.mpi.topology import SLOW, measure_rate

MPI = types.SimpleNamespace(Wtime=time.perf_counter, IN_PLACE=None, MAX=None)


def connected(nodes):
    """Returns a node of several which are all as fast."""
    world = Rank(Network(nodes), 0)
    world.Allreduce = lambda *_: None
    return world


def fake_probe(gbit, most, latency=20e-6):
    def probe(world, mpi, count, nbytes, probes):
        assert nbytes <= max(most, topology.MIN_LARGE_NBYTES)
        return latency + count * nbytes * 8e-9 / gbit

    return probe


@pytest.mark.parametrize(("gbit", "slow"), [(0.1, True), (2.5, True), (5, False), (100, False)])
@pytest.mark.parametrize("nodes", [2, 3, 64])
@pytest.mark.parametrize("slices", [1, 2, 8])
def test_links_are_slow_below_2_7_gbit(monkeypatch, gbit, slow, nodes, slices):
    monkeypatch.setattr(
        topology, "_probe", fake_probe(gbit / slices, most=topology.LARGE_NBYTES // slices)
    )
    measured = measure_rate(connected(nodes), MPI, slices)
    assert (slices * measured < SLOW) == slow


def test_one_node_has_no_links():
    assert measure_rate(connected(1), MPI) == math.inf


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_nodes_measure_together(monkeypatch, nodes):
    arrays, barrier = {}, threading.Barrier(nodes)

    def maximum(rank, _, array, op):
        arrays[rank.rank] = array.copy()
        barrier.wait(60)
        array[:] = np.max(list(arrays.values()), axis=0)

    monkeypatch.setattr(Rank, "Allreduce", maximum, raising=False)
    network = Network(nodes)
    found = network.run(lambda rank: measure_rate(rank, MPI))
    assert network.is_empty and None not in found and len(set(found)) == 1
