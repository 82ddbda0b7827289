"""How far the clock of a rank is ahead of the root's. Knows MPI's communicators by what they do."""

from time import perf_counter_ns

import numpy as np

from keras_dist._engine.communicator import Communicator

__all__ = ["clock_offset"]

ROUNDS = 20
TAG = 7


def clock_offset(comm: Communicator) -> tuple[int, int]:
    """Measures how far `time.perf_counter_ns` of this rank is ahead of that of rank 0.

    Collective: every rank; blocks. Each asks rank 0 for the time, again and again. The answer
    that came soonest counts: it was given between question and answer, so the error is half of
    that time. Where it may be 0 it is 0, as the processes of a node share their clock.

    Args:
        comm: the ranks.

    Returns:
        The difference and the error, in nanoseconds.
    """
    with comm.lock:
        if comm.rank > 0:
            return min((_ask(comm) for _ in range(ROUNDS)), key=lambda found: found[1])
        buffer = np.empty(1, np.int64)
        for rank in range(1, comm.size):
            for _ in range(ROUNDS):
                comm.world.Recv(buffer, rank, TAG)
                comm.world.Send(np.array([perf_counter_ns()], np.int64), rank, TAG)
        return 0, 0


def _ask(comm: Communicator) -> tuple[int, int]:
    answer = np.empty(1, np.int64)
    asked = perf_counter_ns()
    comm.world.Send(answer, 0, TAG)
    comm.world.Recv(answer, 0, TAG)
    answered = perf_counter_ns()
    error = (answered - asked) // 2
    offset = asked + error - int(answer[0])
    return (0 if abs(offset) <= error else offset), error
