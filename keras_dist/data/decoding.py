"""Decoding of samples in several threads, and the handling of damaged samples."""

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

Place = Any  # identifies a sample
Sample = Any  # nested tuples and dicts of arrays


class Decoder:
    """Makes batches of samples that several threads decode.

    Args:
        decode: returns a sample from its place.
        name: returns the name of a sample in messages from its place.
        unreadable: what to do with samples that cannot be decoded: `"raise"` an error, or
            `"skip"` them: other samples of the batch replace them, or the last valid sample if the
            batch has none, so batches keep their sizes.
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
        """Returns a batch of samples.

        Raises:
            DataError: a sample cannot be decoded and is not skipped, or no sample could be decoded.
        """
        decoded = list(self._threads().map(self._attempt, places))
        valid = [sample for sample in decoded if sample is not None]
        if valid:
            self._last = valid[-1]
        elif self._last is not None:
            valid = [self._last]
        else:
            reason = "no sample that was read could be decoded"
            raise self._error(self._name(places[0]), reason, "Check the files and the decoder.")
        filled = [
            each if each is not None else valid[n % len(valid)] for n, each in enumerate(decoded)
        ]
        columns = [list(leaves(sample, "")) for sample in filled]
        arrays = [np.stack([leaf for _, leaf in column]) for column in zip(*columns, strict=True)]
        return mapped(lambda _: arrays.pop(0), filled[0])

    def _attempt(self, place: Place) -> Sample | None:
        try:
            return self._decode(place)
        except Exception as failure:  # decoders raise anything for damaged data
            reason = f"{type(failure).__name__}: {failure}"
            if self._unreadable == "raise":
                remedy = "Copy the file again, or pass unreadable='skip'."
                raise self._error(self._name(place), reason, remedy) from failure
            self._log_once(place, reason)
            return None

    def _log_once(self, place: Place, reason: str) -> None:
        with self._lock:
            if place in self._bad:
                return
            self._bad.add(place)
            count = len(self._bad)
        # Printed by this rank, as no other rank knows of it.
        text = f"{self._name(place)} is skipped, {count} so far on this rank: {reason}"
        line = f"keras_dist: {runtime.where()} {text}"
        print(line.encode(errors="backslashreplace").decode(), flush=True)  # names may not be text

    def _error(self, name: str, reason: str, remedy: str) -> errors.DataError:
        return errors.DataError(
            errors.explain(runtime.where(), f"{name} to be readable", reason, remedy)
        )

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # a fork does not have the threads
                self._pid = os.getpid()
                count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
                self._pool = concurrent.futures.ThreadPoolExecutor(count, "keras_dist decoder")
            return self._pool


def found_of(length: int, sample: Sample) -> Found:
    """Returns the contents of a file with a number of samples like this one."""
    arrays = [(path, np.asarray(leaf)) for path, leaf in leaves(sample, "sample")]
    names = iter([path for path, _ in arrays])
    layout = tuple((path, array.dtype.str, array.shape) for path, array in arrays)
    return Found((length,), layout, mapped(lambda _: next(names), sample))
