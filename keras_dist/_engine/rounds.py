"""Rounds: who exchanges with whom until every node has heard from all. Pure.

Of n nodes, p take part in every round, where p is the largest power of two up to n. Each of the
others first sends to its neighbour, and receives the result at the end. A node exchanges at most
log2(p) + 2 times.

Neighbours exchange first: in `halving` the first messages are the largest, and neighbours tend to
be connected to the same switch. The order of a sum over nodes follows the rounds, whichever
algorithm computes it, so its bits do not depend on the size of an array.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Round:
    """One exchange of a node with another."""

    peer: int
    sends: bool
    receives: bool


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of parts of an array with another node."""

    peer: int
    sent: slice | None
    received: slice | None

    @property
    def reverse(self) -> "Exchange":
        """The exchange that returns what this one has sent and received."""
        return Exchange(self.peer, self.received, self.sent)


def rounds(index: int, count: int) -> list[Round]:
    """Returns the rounds of a node."""
    whole = _power_of_two(count)
    folded = count - whole  # pairs of neighbours of which one takes part in every round
    is_paired = index < 2 * folded
    if is_paired and index % 2:
        return [Round(index - 1, True, False), Round(index - 1, False, True)]
    place = index // 2 if is_paired else index - folded
    distances = [2**step for step in range(whole.bit_length() - 1)]
    others = [place ^ distance for distance in distances]
    plan = [Round(2 * p if p < folded else p + folded, True, True) for p in others]
    if is_paired:
        plan = [Round(index + 1, False, True), *plan, Round(index + 1, True, False)]
    return plan


def doubling(index: int, count: int, size: int) -> tuple[list[Exchange], list[Exchange]]:
    """Returns the exchanges of whole arrays, in the order of the rounds."""
    whole = slice(0, size)
    plan = [
        Exchange(step.peer, whole if step.sends else None, whole if step.receives else None)
        for step in rounds(index, count)
    ]
    is_folded = bool(plan) and (plan[0].sent is None or plan[0].received is None)
    return (plan[:-1], plan[-1:]) if is_folded else (plan, [])


def halving(index: int, count: int, size: int) -> list[Exchange]:
    """Returns the exchanges by which nodes halve an array until each has one segment of it.

    After an exchange a node combines what it has received with its own elements. At the end it has
    the result of the elements it received last. The same exchanges in reverse, with what is sent
    and what is received swapped, give every node the whole result.
    """
    mine = slice(0, size)
    plan = []
    for step in rounds(index, count):
        if step.sends and step.receives:
            middle = (mine.start + mine.stop) // 2
            lower, upper = slice(mine.start, middle), slice(middle, mine.stop)
            mine, given = (lower, upper) if index < step.peer else (upper, lower)
            plan.append(Exchange(step.peer, given, mine))
        elif not plan:
            sent, received = (mine, None) if step.sends else (None, mine)
            plan.append(Exchange(step.peer, sent, received))
    return plan


def combine_rows(rows: Sequence[T], combine: Callable[[T, T], T]) -> tuple[T, T]:
    """Combines the contributions of all nodes, but for the last combination."""
    rest = list(rows)
    while len(rest) > 2:
        whole = _power_of_two(len(rest))
        paired = 2 * (len(rest) - whole) or len(rest)
        pairs = zip(rest[:paired:2], rest[1:paired:2], strict=True)
        rest = [combine(low, high) for low, high in pairs] + rest[paired:]
    return rest[0], rest[1]


def _power_of_two(count: int) -> int:
    """Returns the largest power of two up to a number."""
    return 1 << (count.bit_length() - 1)
