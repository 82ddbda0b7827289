"""Recursive halving and doubling: a reduction over nodes in about 2 log2(nodes) messages.

In each round two nodes exchange halves of what they still reduce, until each has one segment; then
the results take the same way back. If each node sends a segment to every other one, as in
`keras_dist._engine.mpi.reduction`, there are as many messages as nodes, which is slower for small
segments.
"""

import math
from typing import Any

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, combine, divide
from keras_dist._engine.mpi.transfer import as_bytes, wait
from keras_dist._engine.rounds import Exchange, halving
from keras_dist._engine.shm.wait import pause

__all__ = ["crossover", "halving_nbytes", "reduce_by_halves"]

HALF = 5  # MPI tag
PROBE_NBYTES, PROBE_MESSAGES, PROBES = 2**18, 8, 5
SEGMENT_NBYTES = 2**16  # of larger segments, pieces overlap with the arithmetic
PAIR_NBYTES = 2**21  # of two nodes: their segments are the halves


def reduce_by_halves(world: Any, target: np.ndarray, op: ReduceOp, divisor: int) -> None:
    """Reduces a flat array over the ranks, in place. Collective: every rank of `world`; blocks.

    Args:
        world: MPI communicator of the ranks, one of each node.
        target: the contribution of this rank, of a dtype that is its own accumulator; then the
            result.
        op: the reduction.
        divisor: divisor of the result.
    """
    rank = world.Get_rank()
    plan = halving(rank, world.Get_size(), target.size)
    theirs = np.empty_like(target)
    for step in plan:
        _exchange(world, step, target, theirs)
        if step.received is not None:
            left, right = target[step.received], theirs[step.received]
            if rank > step.peer:
                left, right = right, left
            combine(left, right, op, target[step.received])
    reduced = plan[-1].received
    if divisor > 1 and reduced is not None:
        divide(target[reduced], divisor)
    for step in reversed(plan):
        _exchange(world, step.reverse, target, target)


def _exchange(world: Any, step: Exchange, source: np.ndarray, target: np.ndarray) -> None:
    """Sends elements of one array, and receives elements of another, as far as the step does."""
    requests = []
    if step.received is not None:
        requests.append(world.Irecv(as_bytes(target[step.received]), step.peer, HALF))
    if step.sent is not None:
        requests.append(world.Isend(as_bytes(source[step.sent]), step.peer, HALF))
    for request in requests:
        wait(request)


def halving_nbytes(world: Any, mpi: Any) -> int:
    """Measures up to which size halving is faster than segments. Collective; blocks.

    Takes some milliseconds.

    Args:
        world: MPI communicator with one rank of each node.
        mpi: mpi4py's `MPI` module.

    Returns:
        The size of an array in bytes, equal on all ranks of `world`; 0 for 3 nodes, where halving
        has no fewer messages.
    """
    size = world.Get_size()
    if size <= 3:
        return PAIR_NBYTES if size == 2 else 0
    one = _probe(world, mpi, 1, 64)
    each = max(0.0, _probe(world, mpi, PROBE_MESSAGES, 64) - one) / (PROBE_MESSAGES - 1)
    byte = max(0.0, _probe(world, mpi, 1, PROBE_NBYTES) - one) / PROBE_NBYTES
    measured = np.array([one, each, byte])
    world.Allreduce(mpi.IN_PLACE, measured, mpi.MAX)
    return crossover(size, *measured.tolist())


def crossover(nodes: int, latency: float, message: float, byte: float) -> int:
    """Returns the size in bytes up to which halving is faster, by a model of both.

    Args:
        nodes: number of nodes.
        latency: seconds until a message has arrived.
        message: seconds that each further message takes.
        byte: seconds that each byte takes.
    """
    steps = int(math.log2(nodes))
    whole = 2**steps
    folds = whole < nodes
    by_segments = 2 * latency + 2 * (nodes - 2) * message
    by_halves = 2 * (steps + folds) * latency
    if by_halves >= by_segments:
        return 0
    # Nodes beyond the power of two send and receive whole arrays.
    more_bytes = 2 * (1 - 1 / whole) + 2 * folds - 2 * (1 - 1 / nodes)
    largest = SEGMENT_NBYTES * nodes
    if more_bytes * byte <= 0:
        return largest
    return min(largest, int((by_segments - by_halves) / (more_bytes * byte)))


def _probe(world: Any, mpi: Any, count: int, nbytes: int) -> float:
    """Returns the seconds of exchanging messages with both neighbours, the best of some."""
    rank, size = world.Get_rank(), world.Get_size()
    sent, received = np.zeros(nbytes, np.uint8), np.empty((count, nbytes), np.uint8)
    times = []
    for _ in range(PROBES):
        begin = mpi.Wtime()
        requests = [world.Irecv(row, (rank - 1) % size, HALF) for row in received]
        requests += [world.Isend(sent, (rank + 1) % size, HALF) for _ in range(count)]
        for request in requests:
            while not request.Test():
                pause()  # not `wait`: a nap would be measured
        times.append(mpi.Wtime() - begin)
    return min(times)
