"""Memory of the rows that ranks exchange, used again by each exchange. Independent of MPI.

Exchanges differ in size, so memory grows when it is too small. A rank writes to the rows of an
exchange again only after the rendezvous of the next one, when all ranks have read them.
"""

import math
from collections.abc import Callable

import numpy as np

from keras_dist._engine.result_memory import ResultMemory
from keras_dist._engine.shm.node import Node
from keras_dist._engine.shm.segments import Segment


class RowMemory:
    """The shared memory of rows, and the memory of their sums, of one communicator."""

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        """Frees the memory; the same on all ranks."""
        self._segment: Segment | None = None
        self._results: dict[str | None, tuple[int, ResultMemory]] = {}

    def shared(
        self, nbytes: int, node: Node, agree: Callable[[str | None], str | None]
    ) -> tuple[np.ndarray | None, str | None]:
        """Returns memory that all ranks of a node see. Collective: every rank of all nodes.

        Args:
            nbytes: its size, the same on all ranks.

        Returns:
            A uint8 array and `None`, or `None` and the reason; the same on all ranks.
        """
        if self._segment is None or self._segment.memory.size < nbytes:
            self._segment = None  # before the new one: both may not fit
            segment, reason = node.segment(_with_reserve(nbytes))
            if (reason := agree(reason)) is not None or segment is None:
                return None, reason
            self._segment = segment
        return self._segment.memory[:nbytes], None

    def result(self, table: str | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array that nothing else refers to; its memory is used again afterwards.

        Args:
            shape: shape of the array.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        capacity, memory = self._results.get(table, (0, None))
        if memory is None or capacity < nbytes:
            capacity = _with_reserve(nbytes)
            memory = ResultMemory(capacity, np.dtype(np.uint8))
            self._results[table] = capacity, memory
        return memory.take()[:nbytes].view(dtype).reshape(shape)


def _with_reserve(nbytes: int) -> int:
    """Returns a size with a reserve, as the number of rows varies from step to step."""
    return nbytes + nbytes // 4 + 1
