"""What the ranks of a benchmark tell each other."""

import time

from turns import in_turn


def everyones(numbers):
    """Returns the list of numbers of every rank, in rank order."""
    world = mpi_world()
    return [numbers] if world is None else world.allgather(numbers)


def total(number):
    return sum(row[0] for row in everyones([number]))


def barrier():
    world = mpi_world()
    if world is not None:
        world.Barrier()


def time_calls(calls, rounds, repeats=20):
    """Returns milliseconds of calls by name, for each round, those of the slowest rank."""

    def milliseconds(name):
        barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            calls[name]()
        seconds = (time.perf_counter() - begin) / repeats
        return 1e3 * max(row[0] for row in everyones([seconds]))

    for name in calls:
        milliseconds(name)
    return in_turn(calls, rounds, milliseconds)


def mpi_world():
    from keras_dist import runtime

    mpi = runtime.communicator().mpi
    return None if mpi is None else mpi.COMM_WORLD
