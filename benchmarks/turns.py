"""Measuring contenders in turn."""

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SAMPLE_SECONDS = 0.02  # minimum duration of a sample
CONTENDER_SECONDS = 2.0  # for all samples of one contender
MAX_CALLS = 200


def in_turn(
    contenders: Iterable[str], rounds: int, measure: Callable[[str], float]
) -> dict[str, list[float]]:
    """Measures contenders alternately: in a random order in one round, and in reverse in the next.

    The order is the same on all ranks. It varies because a contender may leave ranks on other
    cores, or caches empty, for the next one.
    """
    names, order = list(contenders), random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number % 2:
            names.reverse()
        else:
            order.shuffle(names)
        for name in names:
            found[name].append(measure(name))
    return found


def compare(
    mpi: Any, calls: Mapping[str, Callable[[], Any]], rounds: tuple[int, int]
) -> dict[str, list[float]]:
    """Times collective calls alternately. Collective: every rank of the world."""
    world = mpi.COMM_WORLD

    def sample(name: str, number: int) -> float:
        call = calls[name]
        world.Barrier()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        return world.allreduce(time.perf_counter() - begin, mpi.MAX) / number

    guess = {name: min(sample(name, 1) for _ in range(3)) for name in calls}
    numbers = {name: max(1, min(MAX_CALLS, int(SAMPLE_SECONDS / guess[name]))) for name in calls}
    longest = max(numbers[name] * guess[name] for name in calls)
    count = max(rounds[0], min(rounds[1], int(CONTENDER_SECONDS / longest)))
    return in_turn(calls, count, lambda name: sample(name, numbers[name]))
