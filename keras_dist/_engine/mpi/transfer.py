"""Transfers of bytes of any size."""

import io
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_dist._engine.shm.wait import blocked, pause, waiting
from keras_dist._engine.tracing import spans

IDLE_POLL_SECONDS = 8e-6  # a longer poll has moved data, or has lost the core
# Counts and displacements are an `int` before MPI 4, also for mpi4py over such a library. Larger
# transfers go in chunks, each with an address of its own.
MAX_NBYTES = 2**30  # in one call: below 2**31, as libraries add up counts themselves


class _MessagePickler(pickle.Pickler):
    """Pickles exceptions as their classes define it, whatever other packages register for them.

    `tblib`, which Dask imports, registers a reducer that adds causes, contexts and tracebacks. An
    error in an argument has any cause, also one that cannot be pickled, and other ranks need the
    text alone.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def as_message(value: Any) -> bytes:
    """Returns an object pickled for other ranks, which read it with `pickle.loads`."""
    file = io.BytesIO()
    _MessagePickler(file).dump(value)
    return file.getvalue()


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array in C order: MPI has no bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def wait(request: Any) -> None:
    """Waits for a request; see `pause`."""
    idle_polls, start = 0, time.perf_counter()
    with waiting:
        while not request.Test():
            is_idle = time.perf_counter() - start < IDLE_POLL_SECONDS
            idle_polls = idle_polls + 1 if is_idle else 0
            pause(idle_polls)
            start = time.perf_counter()


def broadcast_bytes(world: Any, buffer: np.ndarray, root: int) -> None:
    """Sends the root's bytes into the buffers of the others. Collective; blocks."""
    for chunk in _chunks(buffer):
        with blocked, spans.phase("transfer"):
            world.Bcast(chunk, root=root)


def allgather_parts(
    world: Any, mine: Any, everything: np.ndarray, bounds: Sequence[tuple[int, int]]
) -> None:
    """Sends the bytes of every rank to all, at `bounds`; `mine` may be `IN_PLACE`. Collective."""
    if everything.size <= MAX_NBYTES:
        starts = [low for low, _ in bounds]
        counts = [high - low for low, high in bounds]
        with blocked, spans.phase("transfer"):
            world.Allgatherv(mine, [everything, counts, starts, "B"])
        return
    for owner, (low, high) in enumerate(bounds):
        if owner == world.Get_rank() and isinstance(mine, np.ndarray):
            everything[low:high] = mine
        broadcast_bytes(world, everything[low:high], owner)


def alltoall_parts(world: Any, payload: np.ndarray, result: np.ndarray, table: np.ndarray) -> None:
    """Sends each rank a part of a buffer. Collective; blocks.

    `table` has the bytes that each rank (first axis) sends to each; equal on all ranks, so that all
    choose the same algorithm.
    """
    rank = world.Get_rank()
    sent, received = table[rank], table[:, rank]
    if max(table.sum(axis=0).max(), table.sum(axis=1).max()) <= MAX_NBYTES:
        with blocked, spans.phase("transfer"):
            world.Alltoallv([payload, sent, "B"], [result, received, "B"])
        return
    # Chunks between two ranks arrive in the order in which they are sent.
    requests = [
        world.Irecv(chunk, peer, tag=0)
        for peer, part in enumerate(_parts(result, received))
        for chunk in _chunks(part)
    ]
    requests += [
        world.Isend(chunk, peer)
        for peer, part in enumerate(_parts(payload, sent))
        for chunk in _chunks(part)
    ]
    with spans.phase("transfer"):
        for request in requests:
            wait(request)


def exchange_with(start: Callable[..., Any], buffer: np.ndarray, peer: int, tag: int) -> None:
    """Sends or receives bytes, by `Isend` or `Irecv` as `start`; blocks until the other does."""
    with spans.phase("transfer"):
        for chunk in _chunks(buffer):
            wait(start(chunk, peer, tag))


def _chunks(buffer: np.ndarray) -> Iterator[np.ndarray]:
    return (buffer[low : low + MAX_NBYTES] for low in range(0, buffer.size, MAX_NBYTES))


def _parts(buffer: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    ends = itertools.accumulate(counts.tolist(), initial=0)
    return (buffer[low:high] for low, high in itertools.pairwise(ends))
