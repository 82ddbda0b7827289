"""In which epoch is the data of this process? All that resumed training needs to know of it.

The order of an epoch follows from its number. Keras does not tell callbacks which data they
train on, so the numbers of all data sets that live are kept: each known by what it is, and
among equal ones by which was made last. A later process that runs the same script finds the
same names.
"""

import collections
import contextlib
import hashlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

__all__ = [
    "Epochs",
    "Shared",
    "go_on_with",
    "held",
    "is_shared_out",
    "is_shared_out_everywhere",
    "kind_of",
    "note",
    "numbers",
    "of",
    "positions",
    "share_out",
    "trained",
    "trained_with",
    "training_on",
]


class Shared(Protocol):
    """Data that can be shared out anew when ranks have died."""

    lock: threading.RLock  # who reads a batch holds it

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and step of the first batch that nobody has asked for on this rank."""

    def share_out(self, rank: int, size: int, position: tuple[int, int] | None) -> None:
        """Shares the data out among fewer ranks, see `epochs.share_out`."""


class Epochs:
    """The epochs of one data set, counted.

    Args:
        kind: what the data set is, the same on all ranks and in every run.
        data: what can be shared out among fewer ranks. Defaults to none: each keeps its part.
    """

    def __init__(self, kind: str, data: Shared | None = None):
        self.kind = kind
        self.number = 0
        # Samples in a step of all ranks, where their order is one for any number of ranks.
        self.global_batch: int | None = None
        # What a later run cannot find again of the order, in words.
        self.forgets: str | None = None
        # Weakly, or data would wait for the garbage collector.
        self._data = weakref.ref(data) if data is not None else lambda: None
        self._lock = threading.Lock()
        _living[next(_serials)] = self

    def advance(self) -> int:
        """Goes on to the next epoch; returns the number of the one before it."""
        with self._lock:
            self.number += 1
            return self.number - 1

    def data(self) -> Shared | None:
        """Returns the data, while it lives and where it can be shared out anew."""
        return self._data()


def kind_of(facts: Sequence[object]) -> str:
    """Returns in one word what is known of a data set, the same in every run."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


_serials = itertools.count()
_living: weakref.WeakValueDictionary[int, Epochs] = weakref.WeakValueDictionary()
_parts: weakref.WeakKeyDictionary[Any, Epochs | None] = weakref.WeakKeyDictionary()
_trained_with: Mapping[str, Any] = {}
_everywhere = True


def note(part: Any, epochs: Epochs | None) -> None:
    """Notes that data has been shared out, and its epochs, where they are counted."""
    with contextlib.suppress(TypeError):  # a list of names, which no training takes
        _parts[part] = epochs


def is_shared_out(data: Any) -> bool:
    """Tells whether this is what `keras_dist.data` has made."""
    try:
        return data in _parts
    except TypeError:
        return False


@contextlib.contextmanager
def training_on(arguments: Mapping[str, Any], everywhere: bool) -> Iterator[None]:
    """Notes which data a fit trains on, as long as it lasts.

    Args:
        arguments: those of the fit on this rank, of which `x` is the data.
        everywhere: whether the data of all ranks has been shared out.
    """
    global _trained_with, _everywhere
    before = _trained_with, _everywhere
    _trained_with, _everywhere = arguments, everywhere
    try:
        yield
    finally:
        _trained_with, _everywhere = before


def is_shared_out_everywhere() -> bool:
    """Tells whether `keras_dist.data` has made what is trained on, on all ranks."""
    return _everywhere


def of(data: Any) -> Epochs | None:
    """Returns the epochs of data, where they are counted."""
    return _parts.get(data) if is_shared_out(data) else None


def trained() -> Epochs | None:
    """Returns the epochs of the data that is trained on, where they are counted."""
    return of(_trained_with.get("x"))


def trained_with() -> Mapping[str, Any]:
    """Returns the arguments of the fit that is going on, by name; none where there is none."""
    return _trained_with


def numbers() -> dict[str, int]:
    """Returns the epoch of each data set that lives; between epochs, the one to come."""
    return {name: epochs.number for name, epochs in _named()}


def go_on_with(epoch_by_name: Mapping[str, int]) -> None:
    """Sets the epochs of the data sets that live, as `numbers` gave them in an earlier run."""
    for name, epochs in _named():
        epochs.number = epoch_by_name.get(name, epochs.number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keeps everybody from reading what can be shared out anew."""
    with contextlib.ExitStack() as stack:
        for _, data in _shared():
            stack.enter_context(data.lock)
        yield


def positions() -> dict[str, tuple[int, int]]:
    """Returns how far data that can be shared out anew has been read, by name: epoch and step."""
    return {name: data.position for name, data in _shared()}


def share_out(rank: int, size: int, read: Sequence[Mapping[str, tuple[int, int]]] = ()) -> None:
    """Shares the data sets that live, as far as they can be, out among fewer ranks.

    Args:
        rank: the number of this rank among them.
        size: how many ranks there are.
        read: the `positions` of all of them: what lies behind is shared out at once. Defaults to
            none: data is shared out from the next epoch on.
    """
    for name, data in _shared():
        known = [each[name] for each in read if name in each]
        data.share_out(rank, size, max(known, default=None))


def _shared() -> Iterator[tuple[str, Shared]]:
    for name, epochs in _named():
        if (data := epochs.data()) is not None:
            yield name, data


def _named() -> Iterator[tuple[str, Epochs]]:
    # From the last made: what an earlier try in this process has left comes behind.
    seen: collections.Counter[str] = collections.Counter()
    for _, epochs in sorted(_living.items(), reverse=True):
        yield f"{epochs.kind} {seen[epochs.kind]}", epochs
        seen[epochs.kind] += 1
