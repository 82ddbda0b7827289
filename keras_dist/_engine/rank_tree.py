"""A tree of ranks, in which none has more than `FANOUT` children. Pure.

A rank passes a message for many ranks to the first rank of each branch, which passes it on to the
rest of that branch. Branches are runs of ranks, so that most of a branch is on the same node.
"""

import itertools
from collections.abc import Sequence

FANOUT = 8


def branches(ranks: Sequence[int]) -> list[Sequence[int]]:
    """Divides ranks into at most `FANOUT` branches of about the same size."""
    count = min(FANOUT, len(ranks))
    bounds = [len(ranks) * place // count for place in range(count + 1)] if count else []
    return [ranks[low:high] for low, high in itertools.pairwise(bounds)]


def height(count: int) -> int:
    """Returns the levels of the tree below a rank."""
    levels = 0
    while count > 0:
        levels, count = levels + 1, -(-count // FANOUT) - 1
    return levels


def parent(rank: int, root: int, size: int) -> int:
    """Returns the rank above a rank in the tree of all ranks, in the order from `root` on."""
    place = (rank - root) % size
    above, low, high = 0, 1, size
    while True:
        inside = range(low, high)
        branch = next(part for part in branches(inside) if part[0] <= place <= part[-1])
        if branch[0] == place:
            return (above + root) % size
        above, low, high = branch[0], branch[0] + 1, branch[-1] + 1
