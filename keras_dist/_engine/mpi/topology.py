"""The place of a rank in the job, on its node and among the nodes, and the links between these."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.shm.wait import blocked

SEGMENT_NBYTES = 2**16  # of larger segments, pieces overlap with the arithmetic
PAIR_NBYTES = 2**21  # of two nodes: their segments are the halves
FOLDED_NBYTES = 256  # by node, if their number is no power of two
PROBE = 8  # MPI tag
SMALL_NBYTES, PROBES = 64, 5
LARGE_NBYTES, LARGE_MESSAGES, LARGE_PROBES = 2**20, 2, 6  # of a node
MIN_LARGE_NBYTES = 2**18  # of a rank
# Bytes per second of a node: 2.7 Gbit/s. Nodes with slower links wait for them rather than for
# their cores, so pieces should hide the arithmetic.
SLOW = 340e6


class Topology:
    """The ranks of an MPI communicator, and which share a node; of one process until `discover`."""

    def __init__(self, world: Any | None = None):
        self.world: Any = world
        self.local: Any = None  # MPI's communicator of the ranks of this node
        self.across: Any = None  # that of this local rank, in the order of `nodes`
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        self.cross_rank, self.cross_size = 0, 1  # among the nodes that have this local rank
        self.is_homogeneous = True  # whether all nodes have the same number of ranks
        self.nodes = [[0]]  # the ranks of each, both in the order of their first rank
        self.slices = 1  # ranks of the smallest node: as many slices of an array cross nodes
        self.first_on_node = 0

    def discover(self, mpi: Any) -> None:
        """Finds out the place of every rank. Collective: every rank; blocks."""
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.local = self.world.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = self.local.Get_rank(), self.local.Get_size()
        self.first_on_node = self.local.bcast(self.rank)
        self.across = self.world.Split(color=self.local_rank, key=self.first_on_node)
        self.cross_rank, self.cross_size = self.across.Get_rank(), self.across.Get_size()
        with_first = enumerate(self.world.allgather(self.first_on_node))
        members: dict[int, list[int]] = {}
        for rank, first in with_first:
            members.setdefault(first, []).append(rank)
        self.nodes = [members[first] for first in sorted(members)]
        self.slices = min(map(len, self.nodes))
        self.is_homogeneous = self.slices == max(map(len, self.nodes))

    @property
    def is_one_node(self) -> bool:
        return self.local_size == self.size

    @property
    def has_slice(self) -> bool:
        """Whether this rank exchanges a slice with the same local rank of all other nodes."""
        return self.local_rank < self.slices

    @property
    def mpi_communicators(self) -> tuple[Any, ...]:
        return tuple(comm for comm in (self.across, self.local, self.world) if comm is not None)


def allgather(comm: Any, value: Any) -> list[Any]:
    """Returns the objects of all ranks of an MPI communicator, in rank order. Collective."""
    with blocked:
        return comm.allgather(value)


def first_error(comm: Any, error: str | None) -> str | None:
    """Returns the error of the first rank that has one, equal on all ranks. Collective."""
    found: Sequence[str | None] = allgather(comm, error)
    return next((text for text in found if text is not None), None)


def ranks_in(comm: Any, other: Any) -> list[int]:
    """Returns the rank in an MPI communicator of each rank of another; `UNDEFINED` if not there."""
    group, others = comm.Get_group(), other.Get_group()
    found: list[int] = others.Translate_ranks(None, group)
    others.Free()
    group.Free()
    return found


def measure_rate(world: Any, mpi: Any, slices: int = 1) -> float:
    """Measures the bytes per second between nodes, of one slice. Collective; blocks."""
    # Takes some milliseconds, and the time in which a node of one to four ranks sends 12 MiB; a
    # larger one sends 3 MiB for each rank.
    nodes = world.Get_size()
    if nodes == 1:
        return math.inf
    large_nbytes = max(LARGE_NBYTES // slices, MIN_LARGE_NBYTES)
    with blocked:
        small = _probe(world, mpi, 1, SMALL_NBYTES, PROBES)
        large = _probe(world, mpi, LARGE_MESSAGES, large_nbytes, LARGE_PROBES)
        seconds = np.array([max(0.0, large - small)])
        world.Allreduce(mpi.IN_PLACE, seconds, mpi.MAX)
    nbytes, longest = LARGE_MESSAGES * large_nbytes, float(seconds[0])
    return nbytes / longest if longest else math.inf


def _probe(world: Any, mpi: Any, count: int, nbytes: int, probes: int) -> float:
    """Returns the seconds of exchanging messages with both neighbours, the best of some."""
    rank, size = world.Get_rank(), world.Get_size()
    sent, received = np.zeros(nbytes, np.uint8), np.empty((count, nbytes), np.uint8)
    times = []
    for _ in range(probes):
        begin = mpi.Wtime()
        requests = [world.Irecv(row, (rank - 1) % size, PROBE) for row in received]
        requests += [world.Isend(sent, (rank + 1) % size, PROBE) for _ in range(count)]
        for request in requests:
            while not request.Test():
                os.sched_yield()  # a nap would be measured
        times.append(mpi.Wtime() - begin)
    return min(times)


def halving_nbytes(nodes: int) -> int:
    """Returns the size in bytes up to which nodes halve arrays."""
    # Halving exchanges about 2 log2(nodes) messages, and the first of them travel with the digests;
    # segments are exchanged by as many messages as there are nodes. Of two nodes both are halves.
    # A power of two nodes sends as many bytes either way, so it halves until segments are so large
    # that their pieces overlap with the arithmetic. Of other numbers, some nodes send and receive
    # whole arrays, so only the messages of many nodes take longer.
    if nodes == 2:
        return PAIR_NBYTES
    return nodes * (SEGMENT_NBYTES if nodes & (nodes - 1) == 0 else FOLDED_NBYTES)
