"""In which epoch is the data of this process? All that resumed training needs to know of it.

The order of an epoch follows from its number. Keras does not tell callbacks which data they
train on, so the numbers of all data sets that live are kept: each known by what it is, and
among equal ones by which was made last. A later process that runs the same script finds the
same names.
"""

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping

__all__ = ["Epochs", "go_on_with", "numbers", "share_out"]


class Epochs:
    """The epochs of one data set, counted.

    Args:
        kind: what the data set is, the same on all ranks and in every run.
        share_out: a method that shares the data out among fewer ranks, from the next epoch on;
            it takes the number of this rank and of all. Defaults to none: each keeps its part.
    """

    def __init__(self, kind: str, share_out: Callable[[int, int], None] | None = None):
        self.kind = kind
        self.number = 0
        # Weakly, or data would wait for the garbage collector.
        self._share_out = weakref.WeakMethod(share_out) if share_out is not None else None
        self._lock = threading.Lock()
        _living[next(_serials)] = self

    def advance(self) -> int:
        """Goes on to the next epoch; returns the number of the one before it."""
        with self._lock:
            self.number += 1
            return self.number - 1

    def share_out(self, rank: int, size: int) -> None:
        """Shares the data out among fewer ranks, if it can be."""
        method = self._share_out() if self._share_out is not None else None
        if method is not None:
            method(rank, size)


_serials = itertools.count()
_living: weakref.WeakValueDictionary[int, Epochs] = weakref.WeakValueDictionary()


def numbers() -> dict[str, int]:
    """Returns the epoch of each data set that lives; between epochs, the one to come."""
    return {name: epochs.number for name, epochs in _named()}


def go_on_with(epoch_by_name: Mapping[str, int]) -> None:
    """Sets the epochs of the data sets that live, as `numbers` gave them in an earlier run."""
    for name, epochs in _named():
        epochs.number = epoch_by_name.get(name, epochs.number)


def share_out(rank: int, size: int) -> None:
    """Shares the data sets that live, as far as they can be, out among fewer ranks."""
    for epochs in list(_living.values()):
        epochs.share_out(rank, size)


def _named() -> Iterator[tuple[str, Epochs]]:
    # From the last made: what an earlier try in this process has left comes behind.
    seen: collections.Counter[str] = collections.Counter()
    for _, epochs in sorted(_living.items(), reverse=True):
        yield f"{epochs.kind} {seen[epochs.kind]}", epochs
        seen[epochs.kind] += 1
