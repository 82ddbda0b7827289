"""The epoch of each data set of this process, which resumed training restores.

Keras does not tell callbacks which data they train on, so this module keeps the epochs of all live
data sets. A data set is identified by a digest of its properties and, among data sets with the same
digest, by the order of creation, latest first. A later process that runs the same script therefore
finds the same names.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_dist import _engine
from keras_dist.runtime.running_calls import OfCall


class Epochs:
    """The current epoch of a data set; `data` can be distributed again after ranks have died."""

    def __init__(self, kind: str, global_batch: int | None = None, data: Any = None):
        self.kind = kind
        self.number = 0
        # Samples of all ranks in a step, if the order does not depend on the number of ranks.
        self.global_batch = global_batch
        # Returns the index of the sample of each row of this rank, if the data keeps its order.
        self.samples: Callable[[], np.ndarray] | None = None
        # What determines the shapes of the batches of this rank, if it is known.
        self.shapes: Hashable | None = None
        # Which part of the order a later run cannot restore, in words.
        self.not_restored: str | None = None
        # Returns the data if it is alive and can be distributed again. A strong reference would
        # keep it alive until the garbage collector runs.
        self.data: Callable[[], Any] = weakref.ref(data) if data is not None else lambda: None
        self._lock = threading.Lock()
        _live[next(_serials)] = self

    def advance(self) -> int:
        """Advances to the next epoch; returns the number of the previous one."""
        with self._lock:
            self.number += 1
            return self.number - 1


def kind_of(facts: Sequence[object]) -> str:
    """Returns a digest of the properties of a data set, the same in every run."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


_serials = itertools.count()
_live: weakref.WeakValueDictionary[int, Epochs] = weakref.WeakValueDictionary()
_sharded: weakref.WeakKeyDictionary[Any, Epochs | None] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(eq=False)
class Fit:
    """What is known of the data of a fit."""

    arguments: Mapping[str, Any]  # those of `fit`, by name; empty outside of a fit
    everywhere: bool = True  # `keras_dist.data` made the training data of all ranks
    equal_batches: bool = False  # of equal shapes in each step, on all ranks
    awaits_steps: bool = False  # has no train function yet: what it reads is not for its steps


#: the running fits
fits = OfCall(Fit({}))


def register(part: Any, epochs: Epochs | None) -> None:
    """Registers the shard of a data set, and its epochs if they are counted."""
    with contextlib.suppress(TypeError):  # a list of names, which nothing trains on
        _sharded[part] = epochs


def is_sharded(data: Any) -> bool:
    """Returns whether `keras_dist.data` made this data set."""
    try:
        return data in _sharded
    except TypeError:
        return False


def awaits_steps(data: Any) -> bool:
    """Returns whether a fit on a data set has begun, and has no train function yet."""
    return any(fit.awaits_steps and fit.arguments.get("x") is data for fit in fits.every())


def is_awaited(known: Epochs) -> bool:
    """Returns the same of data with these epochs, also where a fit reads them ahead."""
    return any(fit.awaits_steps and of(fit.arguments.get("x")) is known for fit in fits.every())


def steps_of(data: Any) -> tuple[Any, int | None]:
    """Returns the running fit, and the steps that it was told to take in an epoch of its data."""
    fit = fits.get()
    # The next epoch of Keras reads on then, instead of from the start, but not where `evaluate`
    # reads the data within the fit, nor with workers, which Keras starts anew.
    trains = fit.arguments.get("x") is data and _engine.progress.progress().tasks[-1:] == ["fit"]
    reads_on = trains and not has_workers(data)
    return fit, fit.arguments.get("steps_per_epoch") if reads_on else None


def has_workers(data: Any) -> bool:
    """Returns whether workers of Keras read the batches of a `PyDataset` in advance."""
    return bool(data.workers > 1 or data.use_multiprocessing)


def of(data: Any) -> Epochs | None:
    """Returns the epochs of a data set, if they are counted."""
    return _sharded.get(data) if is_sharded(data) else None


def numbers() -> dict[str, int]:
    """Returns the epoch of each live data set; between epochs, the next one."""
    return {name: epochs.number for name, epochs in _named()}


def restore(number_by_name: Mapping[str, int]) -> None:
    """Sets the epochs of the live data sets to what `numbers` returned in an earlier run."""
    for name, epochs in _named():
        epochs.number = number_by_name.get(name, epochs.number)


def reshard(rank: int, size: int) -> None:
    """Distributes all live data sets that support it over other ranks, from the next epoch on."""
    for _, epochs in _named():
        if (data := epochs.data()) is not None:
            data.reshard(rank, size)


def _named() -> Iterator[tuple[str, Epochs]]:
    # Latest first: data sets of an earlier attempt in this process come last.
    seen: collections.Counter[str] = collections.Counter()
    for _, epochs in sorted(_live.items(), reverse=True):
        yield f"{epochs.kind} {seen[epochs.kind]}", epochs
        seen[epochs.kind] += 1
