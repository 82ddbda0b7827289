"""Tables: large gradients of which a step fills few rows, as those of embeddings.

Keras on JAX and torch makes the gradient of an embedding dense: rows for what a batch looks up, and
zeros. Only rows that are not zero travel, if all ranks together have few. That depends on the
gradients of the step alone, so a resumed training decides as one that was never interrupted.
"""

import math

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

    def rows(self, array: np.ndarray) -> np.ndarray | None:
        """Returns the indices of the rows that are not zero; `None` if those of a rank are many."""
        length, _ = self._shape
        table, step = array.reshape(self._shape), -(-length // SAMPLED)
        with spans.phase("find rows"):
            if FEW * len(_filled(table[::step])) * step > length:
                return None
            return _filled(table)

    def reduce(
        self,
        comm: Communicator,
        array: np.ndarray,
        indices: np.ndarray | None,
        op: ReduceOp,
        factor: float,
    ) -> np.ndarray | None:
        """Returns the reduced table, flat; `None` if rows of the ranks are too many.

        Collective: every rank, after a rendezvous; blocks.
        """
        length, _ = self._shape
        lengths = np.empty(comm.size, np.int64)
        with blocked:
            comm.world.Allgather(np.array([length if indices is None else len(indices)]), lengths)
        if indices is None or FEW * int(lengths.sum()) > length:
            return None
        mine = contribution(array.reshape(self._shape)[indices], indices, op, adds_up=False)
        sums, places = sum_over_ranks(comm, mine, lengths.tolist(), op, self._bucket.dtype)
        # All of it: the memory was the result of another step, and is the framework's to write to.
        result = self._result.take()
        result.fill(0)
        result.reshape(self._shape)[places] = scaled(sums, factor)
        return result


def _filled(table: np.ndarray) -> np.ndarray:
    """Returns the indices of rows with a bit that is not zero: also those with NaN."""
    nbytes = table.shape[1] * table.itemsize
    words = table.view(f"u{math.gcd(nbytes, 8)}")
    step = max(1, BLOCK_NBYTES // nbytes)
    blocks = range(0, len(words), step)
    return np.concatenate(
        [np.flatnonzero((words[at : at + step] != 0).any(1)) + at for at in blocks]
    )
