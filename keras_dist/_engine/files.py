"""Files read through MPI: by each rank separately, or by all ranks together.

A file that all ranks read together is opened on their communicator, which MPI duplicates: messages
about the file match no message of a reduction. Such a read starts with a rendezvous, as every
collective. A file that is still open at the end of the job is closed then. A file that a rank reads
separately is opened by that rank alone; any thread may read it at any time, without waiting.
"""

import contextlib
import threading
from typing import Any

import numpy as np

from keras_dist import errors
from keras_dist._engine.collectives.rendezvous import rendezvous
from keras_dist._engine.communicator import Communicator
from keras_dist._engine.mpi.transfer import MAX_NBYTES
from keras_dist._engine.shm.wait import blocked
from keras_dist._engine.signature import CollectiveSignature


class File:
    """A file, opened for reading."""

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
            comm.services.add_resource(self)

    def read_at(self, offset: int, target: np.ndarray) -> None:
        """Reads bytes from an offset of the file. Any thread of this rank may call this.

        Args:
            offset: offset in bytes.
            target: uint8 array of shape (count,), written.
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

    def read_together(self, ranges: np.ndarray, target: np.ndarray) -> None:
        """Reads ranges of the file. Collective: every rank, each with its own ranges; blocks.

        Args:
            ranges: int64 array of shape (count, 2): first byte and end of each range, ascending.
            target: uint8 array of the size of all ranges, at most 1 GiB, written.
        """
        mpi, status = self._mpi, self._mpi.Status()
        with self._comm.lock:
            rendezvous(self._comm, CollectiveSignature("a read of a file by all ranks"))
            lengths = (ranges[:, 1] - ranges[:, 0]).tolist()
            wanted = mpi.BYTE.Create_hindexed(lengths, ranges[:, 0].tolist()).Commit()
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
        """Closes the file. Collective if all ranks read it together."""
        if self._together:
            self._comm.services.remove_resource(self)
        if not self._mpi.Is_finalized():
            with self._turn(), self._use:
                self._file.Close()

    def _turn(self) -> Any:
        """Returns a lock around calls of MPI, where MPI allows one thread at a time."""
        free = self._comm.thread_multiple or self._together
        return contextlib.nullcontext() if free else self._comm.lock

    def _check(self, status: Any, target: np.ndarray) -> None:
        count = status.Get_count(self._mpi.BYTE)
        if count != target.size:
            raise self._error(f"to have {target.size} more bytes", str(count))

    def _error(self, expected: str, received: str) -> errors.DataError:
        return errors.DataError(
            self._comm.where(),
            f"{self._path} {expected}",
            " ".join(received.split()),
            "Check that the file is complete and readable on this node; without the argument "
            "mpi_io it is read without MPI.",
        )
