"""What is concluded from the times of messages between nodes."""

import time
import types

import pytest
from thread_ranks import Network, Rank

from keras_dist._engine.mpi import links
from keras_dist._engine.mpi.links import Links, common, measure_links

MPI = types.SimpleNamespace(Wtime=time.perf_counter, IN_PLACE=None, MAX=None)


def connected(nodes):
    """Returns a node of several which are all as fast."""
    world = Rank(Network(nodes), 0)
    world.Allreduce = lambda *_: None
    return world


def fake_probe(gbit, latency=20e-6):
    return lambda world, mpi, count, nbytes, probes: latency + count * nbytes * 8e-9 / gbit


@pytest.mark.parametrize(("gbit", "slow"), [(0.1, True), (2.5, True), (5, False), (100, False)])
@pytest.mark.parametrize("nodes", [2, 3, 64])
def test_links_are_slow_below_2_7_gbit(monkeypatch, gbit, slow, nodes):
    monkeypatch.setattr(links, "_probe", fake_probe(gbit))
    assert measure_links(connected(nodes), MPI).are_slow == slow


def test_one_node_has_no_links():
    assert measure_links(connected(1), MPI) == Links()


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_nodes_measure_together(monkeypatch, nodes):
    monkeypatch.setattr(Rank, "Allreduce", lambda *_: None, raising=False)
    network = Network(nodes)
    found = network.run(lambda rank: measure_links(rank, MPI))
    assert network.is_empty and len(found) == nodes and None not in found


def test_ranks_of_a_node_share_its_links():
    slow = [Links(100, links.SLOW / 4), Links(50, links.SLOW / 2)]
    assert common(slow) == Links(50, links.SLOW * 3 / 4) and common(slow).are_slow
    assert not common([*slow, Links(70, links.SLOW / 2)]).are_slow
    assert common([Links(3)]) == Links(3)
