"""Readers of rows through MPI: by `MPI.File`, or from another rank."""

import os
from collections.abc import Sequence

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.data.blocks import Pieces
from keras_dist.data.readers import FileReader, FlatFile, RowBuffers, bytes_of, to_native
from keras_dist.data.segments import Column


def open_mpi_file(path: str) -> FlatFile:
    """Opens an `MPI.File` on this rank alone."""
    return _engine.File(runtime.communicator(), path, together=False)


class CollectiveReader:
    """Reads rows through `MPI.File`, all ranks at the same time.

    The constructor and the methods are collective, as MPI closes a file only when all ranks call
    it. Files that are open at the end of the job are closed then.
    """

    def __init__(self, columns: Sequence[Column]):
        self._columns, self._buffers = columns, RowBuffers(columns)
        self._files: dict[str, _engine.File] = {}
        self._open()  # an unreadable file is an error before training

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, see `Reader`. Collective: every rank; blocks."""
        if not self._files:
            self._open()
        return [self._rows(column, ranges) for column in self._columns]

    def release(self) -> None:
        """Closes the files until the next read. Collective: every rank; blocks."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self) -> None:
        for path in dict.fromkeys(column.segments[0].path for column in self._columns):
            self._files[path] = _engine.File(runtime.communicator(), path, together=True)

    def _rows(self, column: Column, ranges: Pieces) -> np.ndarray:
        (segment,) = column.segments
        rows = self._buffers.rows(column, ranges)
        byte_ranges = (segment.offset or 0) + ranges * segment.row_nbytes
        self._files[segment.path].read_together(byte_ranges, bytes_of(rows))
        to_native(rows, segment)
        return rows


class RemoteReader:
    """Receives rows that another rank reads. The constructor is collective.

    A rank whose server has died reads the files itself from then on, as does a fork.
    """

    def __init__(self, columns: Sequence[Column], servers: Sequence[int]):
        self._columns, self._buffers, self._pid = columns, RowBuffers(columns), os.getpid()
        self._local = FileReader(columns)
        # A reader of its own for other ranks, so that neither read waits for the other.
        serving = FileReader(columns)
        comm = runtime.communicator()
        self._is_client = servers[comm.rank] != comm.rank
        self._service = _engine.RpcService(
            comm, servers, lambda request: serving.read(request.reshape(-1, 2)), serving.close
        )

    def read(self, ranges: Pieces) -> list[np.ndarray]:
        """Returns the rows of each column, see `Reader`."""
        if not self._is_client or os.getpid() != self._pid or not len(ranges):
            return self._local.read(ranges)
        rows = [self._buffers.rows(column, ranges) for column in self._columns]
        try:
            self._service.call(ranges.reshape(-1), [bytes_of(array) for array in rows])
        except errors.RankLostError:
            self._is_client = False
            return self._local.read(ranges)
        return rows

    def close(self) -> None:
        """Closes the files permanently and ends the requests to the server."""
        self._local.close()
        if os.getpid() == self._pid:
            self._service.leave()
