"""Tables: large gradients of which a step fills few rows, as those of embeddings.

Keras on JAX and torch makes the gradient of an embedding dense: rows for what a batch looks up, and
zeros. Only rows that are not zero travel, if all ranks together have few. That depends on the
gradients of the step alone, so a resumed training decides as one that was never interrupted. To
look for rows takes as long as to reduce a table in the memory of one host, so there only those
travel that a backend knows, see `TableRows`.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keras_dist._engine.arithmetic import ReduceOp, scaled
from keras_dist._engine.buckets import Bucket
from keras_dist._engine.collectives.slices import contribution, sum_over_ranks
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.memory import ResultMemory
from keras_dist._engine.shm.wait import blocked
from keras_dist._engine.tracing import spans

FEW = 4  # rows of all ranks travel if they are at most a quarter of the table
SAMPLED = 64  # rows that tell whether a table is full
BLOCK_NBYTES = 512 * 1024  # looked at together; the cache of a core holds what was found


def most_rows(length: int, ranks: int) -> int:
    """Returns how many rows of a table each of some ranks may fill, if they are to travel."""
    return length // (FEW * ranks)


@dataclasses.dataclass(frozen=True)
class TableRows:
    """A table of `shape` by the rows that a step has filled; those of equal index add up.

    `values` has shape (number of rows, width), and `indices` are those of the rows in the table.
    """

    values: np.ndarray
    indices: np.ndarray
    shape: Sequence[int]

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def scaled(self, factor: float) -> "TableRows":
        return dataclasses.replace(self, values=scaled(self.values, factor))

    def dense(self) -> np.ndarray:
        """Returns the table."""
        rows = contribution(self.values, self.indices, ReduceOp.SUM, adds_up=True)
        table = np.zeros(self.shape, self.dtype)
        table.reshape(len(table), -1)[rows.numbers] = rows.array()
        return table


class SparseTable:
    """A bucket of one large array, reduced by its rows where they are few."""

    def __init__(self, bucket: Bucket):
        [slot] = bucket.slots
        self._bucket = bucket
        self._shape = slot.shape[0], math.prod(slot.shape[1:])
        self.release()

    def release(self) -> None:
        """Frees the memory of the result until the next reduction."""
        self._result = ResultMemory(self._bucket.count, self._bucket.dtype)

    def rows(self, given: np.ndarray | TableRows, finds: bool = True) -> TableRows | None:
        """Returns the rows that are not zero, `None` if they are many; or those given alone."""
        length, _ = self._shape
        if isinstance(given, TableRows):
            return given if FEW * len(given.indices) <= length else None
        if not finds:
            return None
        table, step = given.reshape(self._shape), -(-length // SAMPLED)
        with spans.phase("find rows"):
            if FEW * len(_filled(table[::step])) * step > length:
                return None
            indices = _filled(table)
        return TableRows(table[indices], indices, given.shape)

    def reduce(
        self, comm: Communicator, rows: TableRows | None, op: ReduceOp, factor: float
    ) -> TableRows | None:
        """Returns the reduced rows, each once; `None` if they are too many. Collective; blocks."""
        length, _ = self._shape
        mine = None if rows is None else contribution(rows.values, rows.indices, op, adds_up=True)
        lengths = np.empty(comm.size, np.int64)
        with blocked:
            comm.world.Allgather(np.array([length if mine is None else len(mine)]), lengths)
        if mine is None or FEW * int(lengths.sum()) > length:
            return None
        sums, places = sum_over_ranks(comm, mine, lengths.tolist(), op, self._bucket.dtype)
        return TableRows(scaled(sums, factor), places, self._bucket.slots[0].shape)

    def whole(self, rows: TableRows) -> np.ndarray:
        """Returns a table of which these are the rows, each once."""
        # All of it: the memory was the result of another step, and is the framework's to write to.
        table = self._result.take()
        table.fill(0)
        table.reshape(self._shape)[rows.indices] = rows.values
        return table.reshape(rows.shape)


def _filled(table: np.ndarray) -> np.ndarray:
    """Returns the indices of rows with a bit that is not zero: also those with NaN."""
    nbytes = table.shape[1] * table.itemsize
    words = table.view(f"u{math.gcd(nbytes, 8)}")
    step = max(1, BLOCK_NBYTES // nbytes)
    blocks = range(0, len(words), step)
    return np.concatenate(
        [np.flatnonzero((words[at : at + step] != 0).any(1)) + at for at in blocks]
    )
