"""A reader of rows on some ranks, which send the others theirs."""

from collections.abc import Sequence

import numpy as np

from keras_dist import _engine, runtime
from keras_dist.data.blocks import Pieces
from keras_dist.data.readers import FileReader
from keras_dist.data.segments import Column

OPERATION = "reading rows of files"


class ScatteringReader:
    """Reads rows of files on some ranks."""

    def __init__(self, columns: Sequence[Column], readers: Sequence[int]):
        self._files, self._readers = FileReader(columns), readers
        self._comm = runtime.fit_communicator()

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, see `Reader`. Collective: every rank; blocks."""
        comm, collectives = self._comm, _engine.collectives
        # The name matches calls of threads that data sets read in.
        wanted = collectives.allgather_object(comm, ranges, OPERATION)
        mine = [self._readers[rank] == comm.rank for rank in range(comm.size)]
        given = [part if reads else part[:0] for part, reads in zip(wanted, mine, strict=True)]
        counts = [int((part[:, 1] - part[:, 0]).sum()) for part in given]
        with collectives.raise_on_all(comm, OPERATION, OPERATION):
            columns = self._files.read(np.concatenate(given))
        return [
            collectives.alltoall(comm, rows, counts, OPERATION, OPERATION)[0] for rows in columns
        ]

    def close(self) -> None:
        """Closes the files permanently."""
        self._files.close()
