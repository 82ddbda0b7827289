"""The rows of shared memory for the results of a bucket, and which of them nobody holds.

A row that a rank of the node still reads must not be written. So each rank says before the
rendezvous of a call which rows it holds, and after it all ranks of the node choose the row of the
next call alike: the free row that was used last, which is most likely to be in a cache. The row of
this call is never chosen, as others may still read it, unless all other rows are held: then nobody
is lent this result, and the ranks meet once more when they have copied it.
"""

import numpy as np

from keras_dist._engine.shm.zero_copy import ResultLease


class ResultRows:
    """Chooses rows for results, the same on all ranks of a node.

    Args:
        held: uint64 array of shape (number of ranks, elements of a cache line) in shared memory,
            zeros.

    Attributes:
        count: number of rows.
        next: the row that the next call writes; no rank holds or reads it.
        is_crowded: whether the row of this call is that of the next one as well. Then it must not
            be lent, and the ranks must meet before the next call.
    """

    def __init__(self, count: int, held: np.ndarray, rank: int, lease: ResultLease | None):
        self.count, self._lease = count, lease
        self._held = [line[:1].data for line in held]
        self._mine = self._held[rank]
        self._recent = list(range(count))  # the row that was used last is the first
        self.next, self.is_crowded = 0, False

    def announce(self) -> None:
        """Tells the other ranks which rows this rank holds, before the rendezvous."""
        self._mine[0] = 0 if self._lease is None else self._lease.held

    def advance(self) -> int:
        """Chooses the row of the next call, after the rendezvous; returns the row of this one.

        The ranks must meet again before one of them announces.
        """
        return self.follow(self.choose())

    def choose(self) -> int:
        """Returns the row of the next call, after all ranks have announced; changes nothing.

        It is that of this call if the ranks hold all others.
        """
        held = 0
        for word in self._held:
            held |= word[0]
        row = self.next
        return next((r for r in self._recent if r != row and not held >> r & 1), row)

    def follow(self, chosen: int) -> int:
        """Ends a call: the next one writes the row that was chosen; returns the row of this one."""
        row, self.next = self.next, chosen
        self.is_crowded = chosen == row
        self._recent.remove(row)
        self._recent.insert(0, row)
        return row

    def lend(self, count: int, dtype: np.dtype) -> np.ndarray | None:
        """Returns the result of the last call to read in place, or `None`: copy it."""
        if self._lease is None or self.is_crowded:
            return None
        return self._lease.lend(self._recent[0], count, dtype)
