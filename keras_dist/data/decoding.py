"""Samples that have to be decoded: several at once, and what becomes of those that cannot be."""

import concurrent.futures
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.file_index import Found, Unreadable
from keras_dist.data.nested import leaves, mapped

__all__ = ["Decoder", "found_of"]

Place = Any  # whatever tells one sample from another
Sample = Any  # nested tuples and dicts of arrays


class Decoder:
    """Makes batches of samples that are decoded one by one, by several threads.

    Args:
        decode: returns a sample, given its place.
        name: how a user knows it, given its place.
        unreadable: what becomes of samples that cannot be decoded: `"raise"` an error, or
            `"skip"` them: others of the batch come in their place, or where there are none the last
            that could be, so batches keep their sizes.
    """

    def __init__(
        self,
        decode: Callable[[Place], Sample],
        name: Callable[[Place], str],
        unreadable: Unreadable,
    ):
        self._decode, self._name, self._unreadable = decode, name, unreadable
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._bad: set[Place] = set()
        self._last: Sample | None = None

    def batch(self, places: Sequence[Place]) -> Sample:
        """Returns the samples at these places, stacked.

        Raises:
            DataError: one cannot be decoded and is not to be skipped, or none ever could.
        """
        decoded = list(self._threads().map(self._attempt, places))
        whole = [sample for sample in decoded if sample is not None]
        if whole:
            self._last = whole[-1]
        elif self._last is not None:
            whole = [self._last]
        else:
            said = "no sample that was read could be decoded"
            raise self._error(self._name(places[0]), said, "Look at the files and at the decoder.")
        filled = [
            each if each is not None else whole[n % len(whole)] for n, each in enumerate(decoded)
        ]
        columns = [list(leaves(sample, "")) for sample in filled]
        arrays = [np.stack([leaf for _, leaf in column]) for column in zip(*columns, strict=True)]
        return mapped(lambda _: arrays.pop(0), filled[0])

    def _attempt(self, place: Place) -> Sample | None:
        try:
            return self._decode(place)
        except Exception as failure:  # whatever damaged data makes a decoder do
            said = f"{type(failure).__name__}: {failure}"
            if self._unreadable == "raise":
                remedy = "Bring it there again, or pass unreadable='skip'."
                raise self._error(self._name(place), said, remedy) from failure
            self._note(place, said)
            return None

    def _note(self, place: Place, said: str) -> None:
        with self._lock:
            if place in self._bad:
                return
            self._bad.add(place)
            count = len(self._bad)
        # From this rank, whichever it is: nobody else knows of it.
        text = f"{self._name(place)} is left out, {count} so far on this rank: {said}"
        whole = f"keras_dist: {runtime.where()} {text}"
        print(whole.encode(errors="backslashreplace").decode(), flush=True)  # names may be no text

    def _error(self, name: str, said: str, remedy: str) -> errors.DataError:
        return errors.DataError(
            errors.explain(runtime.where(), f"{name} to be readable", said, remedy)
        )

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # a fork has none of the threads
                self._pid = os.getpid()
                count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
                self._pool = concurrent.futures.ThreadPoolExecutor(count, "keras_dist decoder")
            return self._pool


def found_of(length: int, sample: Sample) -> Found:
    """Returns what stands in a file of so many samples like this one."""
    arrays = [(path, np.asarray(leaf)) for path, leaf in leaves(sample, "sample")]
    names = iter([path for path, _ in arrays])
    layout = tuple((path, array.dtype.str, array.shape) for path, array in arrays)
    return Found((length,), layout, mapped(lambda _: next(names), sample))
