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

HALF = 5  # MPI tag
SEGMENT_NBYTES = 2**16  # of larger segments, pieces overlap with the arithmetic
PAIR_NBYTES = 2**21  # of two nodes: their segments are the halves


def reduce_by_halves(world: Any, target: np.ndarray, op: ReduceOp, divisor: int) -> None:
    """Reduces a flat array over the ranks, in place. Collective: every rank of `world`; blocks."""
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


def crossover(nodes: int, latency: float, message: float, byte: float) -> int:
    """Returns the size in bytes up to which halving is used, by a model of its time.

    Segments travel while further messages are sent, so they take the larger of both times; a round
    of halving waits for the one before. A power of two nodes sends as many bytes either way. It
    halves whenever that is faster for small arrays: for others it costs some latencies at most, and
    fewer bytes leave a switch. Of two nodes, segments are halves, which travel with the digests.

    Args:
        latency: seconds until a message has arrived.
        message: seconds that each further message takes.
        byte: seconds that each byte takes.
    """
    if nodes <= 3:
        return PAIR_NBYTES if nodes == 2 else 0
    steps = int(math.log2(nodes))
    folds = 2**steps < nodes
    # More rounds than those of segments, and fewer messages.
    saved = 2 * (nodes - 2) * message - 2 * (steps + folds - 1) * latency
    if saved <= 0:
        return 0
    largest = SEGMENT_NBYTES * nodes
    if not folds:
        return largest
    # Nodes beyond the power of two send and receive whole arrays.
    sent = 2 * (1 - 1 / 2**steps) + 2
    return largest if largest * sent * byte <= saved else int(saved / (sent * byte))
