"""Files read through MPI: by a rank for itself, or by all ranks together.

A file that is read together is opened on the communicator of all ranks, of which MPI keeps a
duplicate with it: what ranks tell each other about the file meets no message of a reduction. Such
a read begins with a meeting as every collective does, so ranks that come in another order are told
so. What nobody has closed is closed when all ranks come to the end of the job. A file that a rank
reads for itself is opened for that rank alone; it may be read in any thread at any time, and nobody
waits for anybody.
"""

import contextlib
import threading
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.collectives.signature import CollectiveSignature
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import MAX_NBYTES
from keras_dist._engine.shm.wait import blocked

__all__ = ["File"]


class File:
    """A file, opened to read.

    Args:
        comm: the ranks.
        path: the file.
        together: whether all ranks open it and read together. Then opening and closing is
            collective.

    Raises:
        DataError: MPI cannot open it.
    """

    def __init__(self, comm: Communicator, path: str, together: bool):
        self._comm, self._path, self._mpi = comm, path, comm.mpi
        self._together = together
        self._use = threading.Lock()
        try:
            with self._turn():
                world = comm.world if together else self._mpi.COMM_SELF
                self._file = self._mpi.File.Open(world, path, self._mpi.MODE_RDONLY)
        except self._mpi.Exception as failure:
            raise self._error("to be readable through MPI", str(failure)) from failure
        if together:
            comm.services.append(self)

    def read_at(self, offset: int, target: np.ndarray) -> None:
        """Fills memory with what begins at a byte of the file; this rank alone, in any thread.

        Args:
            offset: the byte.
            target: uint8 array of shape (count,).

        Raises:
            DataError: the file cannot be read, or ends before.
        """
        for low in range(0, target.size, MAX_NBYTES):
            part = target[low : low + MAX_NBYTES]
            status = self._mpi.Status()
            try:
                with self._turn(), self._use:
                    self._file.Read_at(offset + low, part, status)
            except self._mpi.Exception as failure:
                raise self._error("to be readable through MPI", str(failure)) from failure
            self._check(status, part)

    def read_together(self, pieces: np.ndarray, target: np.ndarray) -> None:
        """Fills memory with pieces of the file. Collective: every rank, each with its own; blocks.

        Args:
            pieces: int64 of shape (count, 2): the bytes at which each begins and ends, ascending.
            target: uint8 array with room for all; at most 1 GiB.

        Raises:
            DataError: the file cannot be read, or ends before.
            MismatchError: another rank does something else; raised on every rank.
        """
        mpi, status = self._mpi, self._mpi.Status()
        with self._comm.lock:
            rendezvous(self._comm, CollectiveSignature("a reading of a file by all ranks"))
            lengths = (pieces[:, 1] - pieces[:, 0]).tolist()
            wanted = mpi.BYTE.Create_hindexed(lengths, pieces[:, 0].tolist()).Commit()
            try:
                with blocked:
                    self._file.Set_view(0, mpi.BYTE, wanted)
                    self._file.Read_all(target, status)
            except mpi.Exception as failure:
                raise self._error("to be readable through MPI", str(failure)) from failure
            finally:
                wanted.Free()
        self._check(status, target)

    def close(self) -> None:
        """Closes the file. Collective where it is read together."""
        if self._together:
            self._comm.services.remove(self)
        if not self._mpi.Is_finalized():
            with self._turn(), self._use:
                self._file.Close()

    def _turn(self) -> Any:
        """What is held around calls of MPI, where it takes one at a time."""
        free = self._comm.may_thread or self._together
        return contextlib.nullcontext() if free else self._comm.lock

    def _check(self, status: Any, target: np.ndarray) -> None:
        count = status.Get_count(self._mpi.BYTE)
        if count != target.size:
            raise self._error(f"to have {target.size} more bytes", str(count))

    def _error(self, expected: str, received: str) -> errors.DataError:
        return errors.DataError(
            errors.explain(
                self._comm.where(),
                f"{self._path} {expected}",
                " ".join(received.split()),
                "Look whether it is there, whole and readable here; without mpi_io a file is read "
                "without MPI.",
            )
        )
