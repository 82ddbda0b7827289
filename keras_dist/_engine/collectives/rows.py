"""Distribution of rows over ranks, and their transfer as bytes."""

from collections.abc import Sequence

import numpy as np

from keras_dist import errors
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import alltoall_parts, as_bytes
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
    """Sends each rank a part of a buffer. Collective: every rank; blocks.

    Args:
        payload: uint8 array: the part for rank 0, then that for rank 1, and so on; bytes after the
            last part are not sent.
        table: number of bytes that each rank (first axis) sends to each rank; the same on all
            ranks.
    """
    payload = payload[: int(table[comm.rank].sum())]
    if comm.size == 1:
        return payload.copy()
    result = np.empty(int(table[:, comm.rank].sum()), np.uint8)
    alltoall_parts(comm.world, payload, result, table)
    return result


def exchange_rows(comm: Communicator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sends each rank its rows of the arrays of all ranks, in one message.

    Collective: every rank, with arrays of the same shapes and dtypes; blocks.

    Returns:
        For each array a new one of shape (number of ranks, rows of this rank, ...), in rank order.
    """
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
