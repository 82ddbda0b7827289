"""Horovod's build queries, for keras_dist, which looks for an MPI library when it starts."""

from keras_dist import _engine, _gpu, errors, runtime


def mpi_built() -> bool:
    """Returns whether an MPI library was found."""
    return _engine.library.load_mpi() is not None


def mpi_enabled() -> bool:
    """Returns whether this job uses MPI. Initializes keras_dist if needed."""
    return runtime.communicator().mpi is not None


def mpi_threads_supported() -> bool:
    """Returns whether several threads may call MPI at the same time (`MPI_THREAD_MULTIPLE`).

    Raises:
        ArgumentError: keras_dist is not initialized, or no MPI library was found.
    """
    mpi = runtime.communicator().mpi if runtime.is_initialized() else None
    if mpi is not None:
        return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
    raise errors.ArgumentError(
        "[keras_dist]",
        "keras_dist to be initialized, with MPI",
        "no initialized MPI",
        "Call keras_dist.init() first; install an MPI library if there is none.",
    )


def gloo_enabled() -> bool:
    """Returns `False`: keras_dist uses MPI and shared memory."""
    return False


def gloo_built() -> bool:
    """Returns `False`, see `gloo_enabled`."""
    return False


def nccl_built() -> int:
    """Returns the version of NCCL (2.23.4 as 22304); 0 if NCCL cannot be used."""
    nccl = _gpu.load_nccl()
    return 0 if isinstance(nccl, str) else nccl.version()


def ddl_built() -> bool:
    """Returns `False`."""
    return False


def ccl_built() -> bool:
    """Returns `False`."""
    return False


def cuda_built() -> bool:
    """Returns `False`: keras_dist itself has no GPU code."""
    return False


def rocm_built() -> bool:
    """Returns `False`, see `cuda_built`."""
    return False
