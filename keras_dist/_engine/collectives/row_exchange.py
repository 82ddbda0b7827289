"""The rows of all ranks, in shared memory, for a sparse reduction.

Each rank writes its rows to the memory of its node, where the others read them. Between nodes, the
ranks of equal local rank exchange parts of the rows of their nodes, so each row crosses to each
other node once, whatever its number of ranks.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist._engine.buckets import aligned
from keras_dist._engine.collectives.rendezvous import rank_error
from keras_dist._engine.collectives.rows import gather_rows
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import allgather_parts, wait
from keras_dist._engine.shm.node import Node
from keras_dist._engine.tracing import spans

DONE = b"rows are ready.."  # 16 bytes, as a digest
FAILED = b"rows are missing"


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
