"""Ranks that are threads of one process, for tests of `keras_dist.data`."""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

from keras_dist import _engine
from keras_dist.data import consistency
from keras_dist.runtime import job

__all__ = ["numbers_of", "on_ranks", "without_pipelines"]


def on_ranks(size: int, make: Callable[[], Any]) -> list[Any]:
    """Calls a function as each rank of a job, in threads; returns what it returns, by rank.

    One thread runs at a time: numpy reads headers with `ast`, which is not safe in Python 3.11.
    """
    place, turn, barrier = threading.local(), threading.Lock(), threading.Barrier(size)
    said: list[Any] = [None] * size
    results: list[Any] = [None] * size
    failures: list[BaseException | None] = [None] * size

    def allgather_object(value: Any, **options: Any) -> list[Any]:
        said[place.rank] = value
        turn.release()
        try:
            barrier.wait(60)
            everything = list(said)
            barrier.wait(60)
        finally:
            turn.acquire()
        return everything

    def run(rank: int) -> None:
        place.rank = rank
        try:
            with turn:
                results[rank] = make()
        except threading.BrokenBarrierError:  # another rank has failed
            pass
        except BaseException as failure:
            failures[rank] = failure
            barrier.abort()

    def own_rank() -> int:
        return getattr(place, "rank", 0)

    def where() -> str:
        return f"[rank {own_rank()} of {size}]"

    def communicator(process_set: Any = None) -> Any:
        return types.SimpleNamespace(rank=own_rank(), size=size, where=where)

    with (
        mock.patch.object(job, "communicator", communicator),
        mock.patch.object(
            consistency, "ops", types.SimpleNamespace(allgather_object=allgather_object)
        ),
        mock.patch.object(_engine.library, "survives_process_death", lambda: True),
    ):
        threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for failure in failures:
        if failure is not None:
            raise failure
    return results


@contextlib.contextmanager
def without_pipelines() -> Iterator[None]:
    """Makes `PyDataset`s of data instead of pipelines, as where Keras does not use TensorFlow."""
    with mock.patch.object(keras.config, "backend", lambda: "numpy"):
        yield


def numbers_of(
    batch: Any, label: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers
) -> list[int]:
    """Returns the numbers of the samples of a batch; checks that its arrays agree row by row."""
    arrays = [np.asarray(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]
    assert all(array.dtype.isnative for array in arrays)
    first, *others = [array.reshape(len(array), -1)[:, 0].astype(int) for array in arrays]
    for other in others:
        np.testing.assert_array_equal(other, label(first))
    return first.tolist()
