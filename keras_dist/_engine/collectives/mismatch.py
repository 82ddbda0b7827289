"""The error about ranks that differ."""

from keras_dist import errors
from keras_dist._engine.communicator import Communicator


def mismatch(
    comm: Communicator, rank: int, expected: str, received: str, remedy: str
) -> errors.MismatchError:
    """Returns the error, which the job keeps: later errors may follow from it."""
    where = f"[rank {rank} of {comm.job.size}]"
    comm.job.faults.mismatch = errors.explain(where, expected, received, remedy)
    return errors.MismatchError(comm.job.faults.mismatch)
