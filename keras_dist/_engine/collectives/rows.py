"""Rows of arrays between ranks: their distribution, alltoall and reducescatter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, check_dtype, check_sum, reduce_rows, scaled
from keras_dist._engine.collectives.rendezvous import by_name, exchange_or_raise, rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import alltoall_parts, as_bytes
from keras_dist._engine.recovery import retried
from keras_dist._engine.signature import CollectiveSignature, Entry, OpOptions, entries_of_arrays
from keras_dist._gpu import DeviceArray


def check_rows(
    comm: Communicator, array: np.ndarray | DeviceArray, name: str, purpose: str
) -> None:
    """Checks that an array has rows of numbers."""
    if array.ndim == 0:
        expected = f"{name} to have at least one dimension, {purpose}"
        raise errors.ArgumentError(comm.where(), expected, "a scalar", "Reshape it to (1,).")
    check_numbers(comm, array, name, "allgather_object")


def check_numbers(
    comm: Communicator, array: np.ndarray | DeviceArray, name: str, other: str
) -> None:
    """Checks that an array holds numbers, whose bytes are valid on another rank."""
    if array.dtype.hasobject:
        expected = f"{name} to hold numbers"
        remedy = f"Cast it first, or use keras_dist.{other} for objects."
        raise errors.ArgumentTypeError(comm.where(), expected, f"dtype {array.dtype}", remedy)


def row_bounds(count: int, size: int) -> np.ndarray:
    """Returns the bounds of the rows of each rank; the first ranks get one more."""
    ranks = np.arange(size + 1)
    return ranks * (count // size) + np.minimum(ranks, count % size)


def exchange_bytes(comm: Communicator, payload: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Sends each rank its part of a buffer, by a table of bytes from each to each. Collective."""
    payload = payload[: int(table[comm.rank].sum())]
    if comm.size == 1:
        return payload.copy()
    result = np.empty(int(table[:, comm.rank].sum()), np.uint8)
    alltoall_parts(comm.world, payload, result, table)
    return result


def exchange_rows(comm: Communicator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sends each rank its rows; returns arrays of shape (ranks, own rows, ...). Collective."""
    bounds = [row_bounds(len(array), comm.size) for array in arrays]
    parts = [np.split(array, ends[1:-1]) for array, ends in zip(arrays, bounds, strict=True)]
    pieces = [[as_bytes(part[rank]) for part in parts] for rank in range(comm.size)]
    sent = np.array([sum(piece.size for piece in per_rank) for per_rank in pieces])
    payload = np.concatenate([piece for per_rank in pieces for piece in per_rank])
    # Every rank sends the same number of bytes: shapes and dtypes agree.
    flat = exchange_bytes(comm, payload, np.tile(sent, (comm.size, 1)))
    table = flat.reshape(comm.size, -1)
    results, start = [], 0
    for array, piece, ends in zip(arrays, pieces[comm.rank], bounds, strict=True):
        rows = np.ascontiguousarray(table[:, start : start + piece.size])
        shape = (comm.size, int(ends[comm.rank + 1] - ends[comm.rank]), *array.shape[1:])
        results.append(rows.reshape(-1).view(array.dtype).reshape(shape))
        start += piece.size
    return results


def gather_rows(
    comm: Communicator, parts: Sequence[np.ndarray], lengths: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Concatenates the rows of arrays of all ranks. Collective: every rank; blocks."""
    pieces = [as_bytes(part) for part in parts]
    # A single array, the usual case, is not copied first.
    payload = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    widths = [part.itemsize * int(np.prod(part.shape[1:])) for part in parts]
    table = [
        np.split(raw, np.cumsum(np.multiply(rows, widths))[:-1])
        for raw, rows in zip(comm.allgather_bytes(payload), lengths, strict=True)
    ]
    results = []
    for index, part in enumerate(parts):
        joined = np.concatenate([pieces[index] for pieces in table]).view(part.dtype)
        # The number of rows is exchanged, not computed: a row may have no elements.
        count = sum(rows[index] for rows in lengths)
        results.append(joined.reshape((count, *part.shape[1:])))
    return results


@by_name
@retried
def alltoall(
    comm: Communicator, array: np.ndarray, splits: Any, name: str, key: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sends rows to each rank in turn; returns those received, and their numbers. Collective."""
    rest = array.shape[1:]
    entry = Entry(name, (-1, *rest), str(array.dtype))
    with comm.lock:
        rendezvous(comm, CollectiveSignature("alltoall", (entry,), key=key))
        table = _allgather_splits(comm, array, splits, name)
        width = array.itemsize * int(np.prod(rest))
        received = table[:, comm.rank].copy()
        flat = exchange_bytes(comm, as_bytes(array), table * width)
    return flat.view(array.dtype).reshape((int(received.sum()), *rest)), received


def _allgather_splits(comm: Communicator, array: np.ndarray, splits: Any, name: str) -> np.ndarray:
    """Returns how many rows each rank sends to each; the error of one rank is raised on all."""
    mine: Any
    try:
        check_rows(comm, array, name, "to split along")
        mine = _parse_splits(comm, len(array), splits, name).tolist()
    except errors.KerasDistError as error:
        mine = error
    return np.array(exchange_or_raise(comm, mine), np.int64)


def _parse_splits(comm: Communicator, rows: int, splits: Any, name: str) -> np.ndarray:
    size = comm.size
    if splits is None:
        if rows % size:
            raise _bad_splits(
                comm, f"the rows of {name} to be a multiple of {size}", f"{rows} rows"
            )
        return np.full(size, rows // size)
    try:
        counts = np.asarray(splits)
    except Exception as error:  # the other ranks wait for the outcome
        raise _bad_splits(comm, "splits to be a list of integers", repr(error)) from error
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (size,):
        received = f"shape {counts.shape} and dtype {counts.dtype}"
        raise _bad_splits(comm, f"splits to be {size} integers, one for each rank", received)
    if counts.min() < 0 or sum(counts.tolist()) > rows:
        expected = f"splits of {name} to be at least 0 each, and {rows} together at most"
        raise _bad_splits(comm, expected, f"{counts.tolist()}")
    return counts


def _bad_splits(comm: Communicator, expected: str, received: str) -> errors.ArgumentError:
    remedy = "Pass splits, a list of the number of rows for each rank."
    return errors.ArgumentError(comm.where(), expected, received, remedy)


def check_scattered(
    comm: Communicator, arrays: Sequence[Any], names: Sequence[str], op: ReduceOp
) -> None:
    """Checks what `reducescatter` reduces: after its rendezvous, so it fails on all ranks alike."""
    remedy = "Use allreduce for others, and slice the rows of this rank."
    check_sum(op, comm.where(), "reducescatter", remedy)
    for name, array in zip(names, arrays, strict=True):
        check_dtype(array.dtype, op, comm.where(), name)
        check_rows(comm, array, name, "to scatter along")


@by_name
@retried
def reducescatter(
    comm: Communicator, arrays: Sequence[np.ndarray], names: Sequence[str], options: OpOptions
) -> list[np.ndarray]:
    """Reduces arrays and scatters their rows, in one message. Collective: every rank; blocks."""
    call = options.signature("reducescatter", entries=entries_of_arrays(names, arrays))
    with comm.lock:
        rendezvous(comm, call)
        check_scattered(comm, arrays, names, options.op)
        if not arrays:
            return []
        rows = exchange_rows(comm, [scaled(array, options.prescale) for array in arrays])
    return [scaled(reduce_rows(part, options.op), options.postscale) for part in rows]
