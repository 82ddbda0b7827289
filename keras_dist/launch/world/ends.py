"""The ends of ranks, heard in any order, and which one has caused the others."""

import enum


class End(enum.IntEnum):
    """How a rank has ended. Larger ones are more probably consequences."""

    FAILED = 0  # the rank says why
    DIED = 1  # its connection has ended without a word
    ABORTED = 2  # it has called MPI_Abort, perhaps because another rank had died
    WAITED = 3  # it says that it has waited for a rank that had died


WORDS = (End.FAILED, End.WAITED)


class Ends:
    """The ends of the ranks of a job. `len` is the number of ranks that have ended."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[End, str]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, rank: int, end: End, reason: str) -> None:
        """Adds what was heard of a rank.

        The words of a rank replace its abort, and that replaces its death.
        """
        earlier = self._ends[rank][0] if rank in self._ends else End.DIED
        if earlier is End.DIED or (earlier is End.ABORTED and end in WORDS):
            self._ends[rank] = end, reason

    def cause(self) -> tuple[int, End, str]:
        """Returns the most probable cause: the rank, how it has ended, and the reason.

        Of ranks that have failed or died, it is the first one heard: a rank may fail because
        another one has died, without saying so, or die because another one has failed.
        """
        rank = min(self._ends, key=lambda rank: max(self._ends[rank][0], End.DIED))
        return rank, *self._ends[rank]
