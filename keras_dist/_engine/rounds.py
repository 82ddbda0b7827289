"""Rounds: who exchanges with whom until every node has heard from all. Pure.

Of n nodes, the first p take part in every round, where p is the largest power of two up to n. Each
of the others first sends to one of these, and receives the result at the end. A node exchanges at
most log2(p) + 2 times.

The order of a sum over nodes follows the rounds, whichever algorithm computes it, so its bits do
not depend on the size of an array.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["Round", "combine_rows", "rounds"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Round:
    """One exchange of a node with another.

    Args:
        peer: index of the other node.
        sends: whether this node sends.
        receives: whether this node receives.
    """

    peer: int
    sends: bool
    receives: bool


def rounds(index: int, count: int) -> list[Round]:
    """Returns the rounds of a node.

    Args:
        index: index of the node, 0 to `count - 1`.
        count: number of nodes.
    """
    whole = _power_of_two(count)
    if index >= whole:
        return [Round(index - whole, True, False), Round(index - whole, False, True)]
    plan, distance = [], whole // 2
    while distance:
        plan.append(Round(index ^ distance, True, True))
        distance //= 2
    if index + whole < count:
        plan.insert(0, Round(index + whole, False, True))
        plan.append(Round(index + whole, True, False))
    return plan


def combine_rows(rows: Sequence[T], combine: Callable[[T, T], T]) -> tuple[T, T]:
    """Combines the contributions of all nodes, but for the last combination.

    Args:
        rows: contributions of two or more nodes, in their order.
        combine: combines two contributions; the one of the lower node comes first.

    Returns:
        The last two operands.
    """
    rest, width = list(rows), _power_of_two(len(rows))
    if width == len(rest):
        width //= 2
    while len(rest) > 2:
        upper = rest[width:]
        rest = [
            combine(row, upper[place]) if place < len(upper) else row
            for place, row in enumerate(rest[:width])
        ]
        width //= 2
    return rest[0], rest[1]


def _power_of_two(count: int) -> int:
    """Returns the largest power of two up to a number."""
    return 1 << (count.bit_length() - 1)
