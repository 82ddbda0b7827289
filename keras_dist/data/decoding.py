"""Decoding of samples in several threads, with a policy for samples that fail."""

import concurrent.futures
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist import errors, runtime
from keras_dist.data.file_index import Found, Unreadable
from keras_dist.data.nested import leaves, mapped

Key = Any  # hashable; identifies a sample
Sample = Any  # nested tuples and dicts of arrays


class Decoder:
    """Makes batches of samples, each decoded by one of several threads."""

    def __init__(
        self,
        decode: Callable[[Key], Sample],
        name: Callable[[Key], str],
        unreadable: Unreadable,
    ):
        self._decode, self._name, self._unreadable = decode, name, unreadable
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._skipped: set[Key] = set()
        self._last: Sample | None = None

    def batch(self, keys: Sequence[Key]) -> Sample:
        """Decodes and stacks samples."""
        samples = list(self._threads().map(self._attempt, keys))
        decoded = [sample for sample in samples if sample is not None]
        if decoded:
            self._last = decoded[-1]
        elif self._last is not None:
            decoded = [self._last]
        else:
            reason = "no sample has been decoded successfully"
            raise self._error(self._name(keys[0]), reason, "Check the files and the decoder.")
        filled = [
            sample if sample is not None else decoded[n % len(decoded)]
            for n, sample in enumerate(samples)
        ]
        columns = [list(leaves(sample, "")) for sample in filled]
        arrays = [np.stack([leaf for _, leaf in column]) for column in zip(*columns, strict=True)]
        return mapped(lambda _: arrays.pop(0), filled[0])

    def _attempt(self, key: Key) -> Sample | None:
        try:
            return self._decode(key)
        except Exception as failure:  # damaged data may raise anything
            reason = f"{type(failure).__name__}: {failure}"
            if self._unreadable == "raise":
                remedy = "Replace the file, or pass unreadable='skip'."
                raise self._error(self._name(key), reason, remedy) from failure
            self._report(key, reason)
            return None

    def _report(self, key: Key, reason: str) -> None:
        with self._lock:
            if key in self._skipped:
                return
            self._skipped.add(key)
            count = len(self._skipped)
        # Printed by this rank, as the other ranks do not know of it.
        text = f"{self._name(key)} is skipped, {count} so far on this rank: {reason}"
        line = f"keras_dist: {runtime.where()} {text}"
        # File names may hold bytes that are not valid text.
        print(line.encode(errors="backslashreplace").decode(), flush=True)

    def _error(self, name: str, reason: str, remedy: str) -> errors.DataError:
        return errors.DataError(runtime.where(), f"{name} to be readable", reason, remedy)

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # threads do not survive a fork
                self._pid = os.getpid()
                count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
                self._pool = concurrent.futures.ThreadPoolExecutor(count, "keras_dist decoder")
            return self._pool


def found_of(length: int, sample: Sample) -> Found:
    """Describes a file of `length` samples that are all like `sample`."""
    arrays = [(path, np.asarray(leaf)) for path, leaf in leaves(sample, "sample")]
    names = iter([path for path, _ in arrays])
    layout = tuple((path, array.dtype.str, array.shape) for path, array in arrays)
    return Found((length,), layout, mapped(lambda _: next(names), sample))
