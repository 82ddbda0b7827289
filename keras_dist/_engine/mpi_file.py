"""Files that a rank reads through MPI by itself, in any thread."""

import contextlib
import threading
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import MAX_NBYTES


class File:
    """A file, opened for reading."""

    def __init__(self, comm: Communicator, path: str):
        self._comm, self._path, self._mpi = comm, path, comm.mpi
        self._use = threading.Lock()
        try:
            with self._turn():
                self._file = self._mpi.File.Open(self._mpi.COMM_SELF, path, self._mpi.MODE_RDONLY)
        except self._mpi.Exception as failure:
            raise self._error("to be readable through MPI", str(failure)) from failure

    def read_at(self, offset: int, target: np.ndarray) -> None:
        for low in range(0, target.size, MAX_NBYTES):
            part = target[low : low + MAX_NBYTES]
            status = self._mpi.Status()
            try:
                with self._turn(), self._use:
                    self._file.Read_at(offset + low, part, status)
            except self._mpi.Exception as failure:
                raise self._error("to be readable through MPI", str(failure)) from failure
            count = status.Get_count(self._mpi.BYTE)
            if count != part.size:
                raise self._error(f"to have {part.size} more bytes", str(count))

    def close(self) -> None:
        if not self._mpi.Is_finalized():
            with self._turn(), self._use:
                self._file.Close()

    def _turn(self) -> Any:
        """Returns a lock around calls of MPI, where MPI allows one thread at a time."""
        return contextlib.nullcontext() if self._comm.thread_multiple else self._comm.lock

    def _error(self, expected: str, received: str) -> errors.DataError:
        return errors.DataError(
            self._comm.where(),
            f"{self._path} {expected}",
            " ".join(received.split()),
            "Check that the file is complete and readable on this node; without the argument "
            "mpi_io it is read without MPI.",
        )
