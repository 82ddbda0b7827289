"""What Horovod's functions of these names tell, told of keras_dist: MPI is all that it needs.

Where Horovod was built with or without a library, keras_dist finds MPI or not when it starts.
"""

from keras_dist import _engine, errors, runtime

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Tells whether an MPI library was found."""
    return _engine.load_mpi() is not None


def mpi_enabled() -> bool:
    """Tells whether this job uses MPI. Initialises keras_dist when the user has not."""
    return runtime.communicator().mpi is not None


def mpi_threads_supported() -> bool:
    """Tells whether MPI may be called by several threads at once.

    Raises:
        ArgumentError: keras_dist is not initialised, or has no MPI.
    """
    mpi = runtime.communicator().mpi if runtime.is_initialized() else None
    if mpi is not None:
        return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)
    raise errors.ArgumentError(
        errors.explain(
            "[keras_dist]",
            "keras_dist to be initialised, with MPI",
            "that it is not",
            "Call keras_dist.init() first; install an MPI library where there is none.",
        )
    )


def gloo_enabled() -> bool:
    """Returns `False`: keras_dist uses MPI and shared memory."""
    return False


def gloo_built() -> bool:
    """Returns `False`, see `gloo_enabled`."""
    return False


def nccl_built() -> int:
    """Returns 0: tensors of a GPU travel through the host."""
    return 0


def ddl_built() -> bool:
    """Returns `False`."""
    return False


def ccl_built() -> bool:
    """Returns `False`."""
    return False


def cuda_built() -> bool:
    """Returns `False`: keras_dist itself has no code for GPUs."""
    return False


def rocm_built() -> bool:
    """Returns `False`, see `cuda_built`."""
    return False
