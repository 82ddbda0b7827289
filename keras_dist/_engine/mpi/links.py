"""The network between nodes, as it is measured when ranks connect."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist._engine.mpi.halving import crossover
from keras_dist._engine.shm.wait import blocked

PROBE = 8  # MPI tag
SMALL_NBYTES, MESSAGES, PROBES = 64, 8, 5
LARGE_NBYTES, LARGE_MESSAGES, LARGE_PROBES = 2**20, 2, 6  # of a node
MIN_LARGE_NBYTES = 2**18  # of a rank
# Bytes per second of a node: 2.7 Gbit/s. Nodes with slower links wait for them rather than for
# their cores.
SLOW = 340e6


@dataclasses.dataclass(frozen=True)
class Links:
    """What the links between nodes can do.

    Args:
        halving_nbytes: size in bytes up to which nodes halve arrays recursively. Defaults to 0:
            never.
        rate: bytes per second of a node in each direction, in both at once. Defaults to infinity.
    """

    halving_nbytes: int = 0
    rate: float = math.inf

    @property
    def are_slow(self) -> bool:
        """Whether nodes wait for the links, so that pieces should hide the arithmetic."""
        return self.rate < SLOW


def common(every: Sequence[Links]) -> Links:
    """Returns the links of a node."""
    return Links(min(each.halving_nbytes for each in every), sum(each.rate for each in every))


def measure_links(world: Any, mpi: Any, slices: int = 1) -> Links:
    """Measures the links between nodes. Collective; blocks.

    Takes some milliseconds, and the time in which a node of one to four ranks sends 12 MiB; a
    larger one sends 3 MiB for each rank.
    """
    nodes = world.Get_size()
    if nodes == 1:
        return Links()
    large_nbytes = max(LARGE_NBYTES // slices, MIN_LARGE_NBYTES)
    with blocked:
        one = _probe(world, mpi, 1, SMALL_NBYTES, PROBES)
        several = _probe(world, mpi, MESSAGES, SMALL_NBYTES, PROBES)
        large = _probe(world, mpi, LARGE_MESSAGES, large_nbytes, LARGE_PROBES)
        message = max(0.0, several - one) / (MESSAGES - 1)
        byte = max(0.0, large - one) / (LARGE_MESSAGES * large_nbytes)
        measured = np.array([one, message, byte])
        world.Allreduce(mpi.IN_PLACE, measured, mpi.MAX)
    one, message, byte = measured.tolist()
    return Links(crossover(nodes, one, message, byte), 1 / byte if byte else math.inf)


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
