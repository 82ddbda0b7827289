"""The MPI library behind mpi4py: loaded, started, named. Knows no ranks."""

import sys
from typing import Any

__all__ = ["is_communicator", "library", "load_mpi", "mpi_failure", "start_mpi"]

_failure: str | None = None


def load_mpi() -> Any | None:
    """Imports mpi4py's MPI but does not initialise it, so that it can be looked at first.

    An MPI library that was started by the launcher of another one may end the process as
    soon as it is initialised.

    Returns:
        mpi4py's `MPI` module; `None` when there is no MPI library, see `mpi_failure`.
    """
    global _failure
    import mpi4py

    initialize, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    finalize, mpi4py.rc.finalize = mpi4py.rc.finalize, True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises either, by version and cause
        _failure = str(error).splitlines()[0]
        return None
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = initialize, finalize
    return MPI


def start_mpi(mpi: Any) -> None:
    """Initialises MPI with the thread level that mpi4py is set to, unless it has been."""
    import mpi4py

    if not mpi.Is_initialized():
        mpi.Init_thread(getattr(mpi, f"THREAD_{mpi4py.rc.thread_level.upper()}"))


def mpi_failure() -> str | None:
    """Returns why MPI could not be loaded, in one line; `None` when it was."""
    return _failure


def library(mpi: Any) -> str:
    """Returns the name and version of the MPI library in use, in one line."""
    lines = mpi.Get_library_version().replace("\0", "").strip().splitlines()
    return " ".join(lines[0].split())


def is_communicator(value: Any) -> bool:
    """Tells whether a value is an mpi4py communicator; imports nothing to find out."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(value, module.Comm)
