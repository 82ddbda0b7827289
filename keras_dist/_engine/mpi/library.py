"""The MPI library behind mpi4py: loading, start, identification, end."""

import contextlib
import ctypes
import fcntl
import functools
import os
import platform
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NO_ROOM = "A container gets more by --shm-size=1g (Docker, Podman) or --bind /dev/shm (Apptainer)."
ULFM = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's mpiexec

_failure: str | None = None
_is_ours_to_end = False


def load_mpi() -> Any | None:
    """Imports mpi4py's MPI without initialising it, so that it can be checked first."""
    # An MPI library that was started by the launcher of another one may end the process as soon as
    # it is initialised. mpi4py does not finalise it either, unless the script has imported MPI
    # before: it would do so in forked children as well, and their parents would wait.
    global _failure, _is_ours_to_end
    import mpi4py

    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    initialize, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    finalize, mpi4py.rc.finalize = mpi4py.rc.finalize, False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises either, by version and cause
        _failure = str(error).splitlines()[0]
        return None
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = initialize, finalize
    _is_ours_to_end = True
    return MPI


def is_loaded_here() -> bool:
    """Returns whether `load_mpi` has loaded MPI, not the script of the user."""
    return _is_ours_to_end


def start_mpi(mpi: Any) -> None:
    """Initialises MPI with the thread level of mpi4py, unless it is initialised."""
    import mpi4py

    if not mpi.Is_initialized():
        if survives_process_death():
            # In MPI_Finalize Open MPI would wait for dead ranks as well, sometimes forever.
            os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
        mpi.Init_thread(getattr(mpi, f"THREAD_{mpi4py.rc.thread_level.upper()}"))


def failed_process(mpi: Any, error: BaseException) -> bool:
    """Returns whether an MPI error reports the death of a process, here or on another rank."""
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    return isinstance(error, mpi.Exception) and error.Get_error_class() in classes


def survives_process_death() -> bool:
    """Returns whether MPI continues when a process dies: Open MPI 5 with `--with-ft ulfm`."""
    return os.environ.get(ULFM) in ("1", "true")


def stop_mpi() -> None:
    """Finalises MPI at the end of a rank, if it was loaded here. Collective: every rank."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if _is_ours_to_end and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def shared_memory_nbytes() -> int:
    """Returns the room in `/dev/shm`, in bytes; 0 without it."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def unlink_mpich_memory() -> None:
    """Unlinks the shared memory files of MPICH, so that a killed job leaves none."""
    # MPICH opens them by name only while it starts. Every rank of the node must have started MPI.
    # One of them also unlinks the files of jobs that were killed before they came here.
    maps = Path("/proc/self/maps")
    if maps.exists():
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+$", maps.read_text(), re.MULTILINE)):
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.unlink(name)
                _unlink_unused(Path(name).parent.glob("mpich_shm_*"))


def _unlink_unused(paths: Iterable[Path]) -> None:
    """Unlinks the files of this user that no process has open or mapped, in any container.

    Only on such a file does the kernel give a lease. A process that opens it now waits for the end
    of the lease, and the signal of which this process is told is one that is ignored by default.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # in use, of another user, or gone
            file = os.open(path, os.O_RDWR)
            try:
                if os.fstat(file).st_uid != os.getuid():
                    continue
                fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                os.unlink(path)
            finally:
                os.close(file)  # ends the lease


def mpi_failure() -> str | None:
    """Returns the reason why MPI could not be loaded, in one line; `None` if it was."""
    return _failure


def version(mpi: Any) -> str:
    """Returns the name and version of the MPI library in use, in one line."""
    lines = mpi.Get_library_version().replace("\0", "").strip().splitlines()
    return " ".join(lines[0].split())


@functools.cache
def is_cuda_aware() -> bool | None:
    """Returns whether the MPI library accepts GPU memory; `None` if it does not say."""
    maps = Path("/proc/self/maps")
    paths = set(re.findall(r"/\S*/libmpi\S*\.so\S*", maps.read_text())) if maps.exists() else set()
    for path in sorted(paths):
        with contextlib.suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
    return None


def is_communicator(value: Any) -> bool:
    """Returns whether a value is an mpi4py communicator, without an import of mpi4py."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(value, module.Comm)


def orders_stores() -> bool:
    """Returns whether other cores see the stores of a core in their order."""
    return platform.machine() == "x86_64"


class MemoryFence:
    """A full memory fence: accesses before a call take place before those after it.

    Python has none. `MPI_Win_sync` is one: the MPI standard defines it as the memory barrier of
    programs that share memory. The window belongs to this process alone. It is one of shared
    memory, since the libraries use no fence for others.
    """

    def __init__(self, mpi: Any):
        self._window = mpi.Win.Allocate_shared(1, comm=mpi.COMM_SELF)
        self._window.Lock_all()  # MPI_Win_sync is allowed in an epoch only
        self._sync = self._window.Sync

    def __call__(self) -> None:
        self._sync()

    def free(self) -> None:
        self._window.Unlock_all()
        self._window.Free()
