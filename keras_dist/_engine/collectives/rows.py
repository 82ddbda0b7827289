"""Rows of arrays between ranks: their distribution, alltoall and reducescatter, see decision 53."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.arithmetic import ReduceOp, check_dtype, check_sum, reduce_rows, scaled
from keras_dist._engine.buckets import aligned
from keras_dist._engine.collectives.rendezvous import (
    by_name,
    exchange_or_raise,
    rank_error,
    rendezvous,
)
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import allgather_parts, alltoall_parts, as_bytes, wait
from keras_dist._engine.recovery import retried
from keras_dist._engine.shm.node import Node
from keras_dist._engine.signature import CollectiveSignature, Entry, OpOptions, entries_of_arrays
from keras_dist._engine.tracing import spans
from keras_dist._gpu import DeviceArray

DONE = b"rows are ready.."  # 16 bytes, as a digest
FAILED = b"rows are missing"


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


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table, which `write` writes to an array of shape (number of rows, width)."""

    width: int
    dtype: np.dtype
    numbers: np.ndarray
    write: Callable[[np.ndarray], None]

    def __len__(self) -> int:
        return len(self.numbers)

    def array(self) -> np.ndarray:
        rows = np.empty((len(self), self.width), self.dtype)
        self.write(rows)
        return rows


def exchange_rows_of_nodes(
    comm: Communicator, mine: Rows, lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the rows of all ranks. Collective: every rank, after a rendezvous; blocks.

    Returns:
        The rows, shape (number of rows of all ranks, width), in memory that the next exchange
        writes to; their indices, in rank order; and the place of each row, in rank order, among
        the rows. `None`: rows are in rank order.
    """
    node, memory = comm.node, _memory(comm, mine, sum(lengths))
    if node is None or memory is None:
        parts = [mine.array(), mine.numbers]
        rows, numbers = gather_rows(comm, parts, [[length] * 2 for length in lengths])
        return rows, numbers, None
    # By node, so that the rows of a node are one part.
    in_memory = [rank for ranks in comm.topology.nodes for rank in ranks]
    ends = np.cumsum([lengths[rank] for rank in in_memory])
    slices = {
        rank: slice(int(end) - lengths[rank], int(end))
        for rank, end in zip(in_memory, ends, strict=True)
    }
    rows, numbers = memory
    failure: Exception | None = None
    try:
        with spans.phase("copy in"):
            mine.write(rows[slices[comm.rank]])
            numbers[slices[comm.rank]] = mine.numbers
    except Exception as error:  # the other ranks wait
        failure = error
    is_ready = _are_ready(node, failure is None)
    if not comm.is_one_node:
        if comm.topology.has_slice:
            is_ready = _cross_nodes(comm, memory, [slices[rank] for rank in in_memory], is_ready)
        is_ready = _are_ready(node, is_ready)
    if not is_ready:
        received = "an error on another rank" if failure is None else repr(failure)
        raise rank_error(comm, "every rank to add up its rows", received) from failure
    if in_memory == sorted(in_memory):
        return rows, numbers, None
    places = np.concatenate(
        [np.arange(part.start, part.stop) for _, part in sorted(slices.items())]
    )
    return rows, numbers[places], places


def _memory(comm: Communicator, mine: Rows, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    if comm.node is None:
        return None
    row_nbytes = mine.width * mine.dtype.itemsize
    start = aligned(count * row_nbytes)
    nbytes = start + count * mine.numbers.itemsize
    memory = comm.row_memory.shared(nbytes, comm.segment)
    comm.idle_memory.used(comm.row_memory, is_update=False)
    if memory is None:
        return None
    rows = memory[: count * row_nbytes].view(mine.dtype).reshape(count, mine.width)
    return rows, memory[start:nbytes].view(mine.numbers.dtype)


def _are_ready(node: Node, is_ready: bool) -> bool:
    """Returns whether all ranks of the node are ready. Collective: every rank of the node."""
    with spans.phase("wait for rows"):
        return node.barrier(DONE if is_ready else FAILED) and is_ready


def _cross_nodes(
    comm: Communicator, memory: Sequence[np.ndarray], slices: Sequence[slice], is_ready: bool
) -> bool:
    topology = comm.topology
    sizes = [len(node) for node in topology.nodes]
    lasts = np.cumsum(sizes) - 1
    everywhere = np.array([is_ready], np.uint8)
    answer = topology.across.Iallreduce(everywhere.copy(), everywhere, comm.mpi.MIN)
    with spans.phase("cross-node"):
        for array in memory:
            width = array[:1].nbytes if len(array) else 0
            bounds = []
            for size, last in zip(sizes, lasts, strict=True):
                low = slices[last - size + 1].start * width
                nbytes = slices[last].stop * width - low
                cuts = [
                    low + nbytes * (topology.local_rank + more) // topology.slices
                    for more in (0, 1)
                ]
                bounds.append((cuts[0], cuts[1]))
            flat = array.reshape(-1).view(np.uint8)
            allgather_parts(topology.across, comm.mpi.IN_PLACE, flat, bounds)
        wait(answer)
    return bool(everywhere[0])


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
