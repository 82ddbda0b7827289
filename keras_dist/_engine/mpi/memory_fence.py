"""A memory fence for processors that may reorder the stores of a core.

Python has none. `MPI_Win_sync` is one: the MPI standard defines it as the memory barrier of
programs that share memory between processes.
"""

import platform
from typing import Any


def orders_stores() -> bool:
    """Returns whether other cores see the stores of a core in their order."""
    return platform.machine() == "x86_64"


class MemoryFence:
    """A full memory fence: accesses before a call take place before those after it.

    The window belongs to this process alone. It is one of shared memory, since the libraries use no
    fence for others.
    """

    def __init__(self, mpi: Any):
        self._window = mpi.Win.Allocate_shared(1, comm=mpi.COMM_SELF)
        self._window.Lock_all()  # MPI_Win_sync is allowed in an epoch only
        self._sync = self._window.Sync

    def __call__(self) -> None:
        self._sync()

    def free(self) -> None:
        """Frees the window."""
        self._window.Unlock_all()
        self._window.Free()
