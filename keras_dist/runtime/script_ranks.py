"""The rank and the number of ranks as a script sees them.

A process that joins a running job runs its script alone until it trains. Until then the script sees
the place of the last rank at the start of the job, so that it makes the model and the data of the
others, and leaves to rank 0 what rank 0 does.
"""

from keras_dist.runtime import job


def rank() -> int:
    """Returns the rank of this process, 0 to `size() - 1`."""
    actual, place = job.rank(), job.joins_as()
    return actual if place is None else place.rank


def size() -> int:
    """Returns the number of ranks of the job."""
    actual, place = job.size(), job.joins_as()
    return actual if place is None else place.size


def local_rank() -> int:
    """Returns the rank of this process on its node, which selects its GPU."""
    actual, place = job.local_rank(), job.joins_as()
    return actual if place is None else place.local_rank
