"""Clock offset of a rank from the root."""

from time import perf_counter_ns

import numpy as np

from keras_dist._engine.communicator import Communicator

ROUNDS = 20
TAG = 7


def clock_offset(comm: Communicator) -> tuple[int, int]:
    """Measures the offset of `time.perf_counter_ns` of this rank from that of rank 0.

    Collective: every rank; blocks. Each rank asks rank 0 for the time repeatedly. The answer with
    the shortest round trip counts; its error is half of that time. An offset within the error is
    0, as the processes of a node share their clock.

    Returns:
        The offset and its error, in nanoseconds.
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
