"""The size of buckets: set by the user, measured by the ranks, or the default."""

import logging

from keras_dist import _engine, config

_log = logging.getLogger("keras_dist")

USUAL_BUCKET_NBYTES = 25 * 2**20
ONE_BUCKET_NBYTES = 2**62  # for all gradients
# On the host, with overlap, what is left when backpropagation ends is about a bucket.
OVERLAPPED_BUCKET_NBYTES = 4 * 2**20


def bucket_nbytes(
    comm: _engine.Communicator,
    gradients: _engine.CollectiveSignature | None = None,
    nbytes: int = 0,
    overlaps: bool = False,
    by_nccl: bool = False,
) -> int:
    """Returns the size in bytes at which a bucket is closed.

    Collective if the gradients exceed one bucket of the default size, do not overlap and travel
    through the host: the ranks measure once, unless `KERAS_DIST_BUCKET_NBYTES` is set.

    Args:
        nbytes: size of the gradients in bytes.
    """
    chosen = config.settings().bucket_nbytes
    if by_nccl and not chosen:
        return USUAL_BUCKET_NBYTES if overlaps else ONE_BUCKET_NBYTES
    if overlaps and not chosen:
        return OVERLAPPED_BUCKET_NBYTES
    if chosen or gradients is None or comm.size == 1 or nbytes <= USUAL_BUCKET_NBYTES:
        return chosen or USUAL_BUCKET_NBYTES
    if comm.bucket_nbytes is None:
        comm.bucket_nbytes, how = _engine.best_bucket_nbytes(comm, gradients, nbytes)
        if comm.rank == 0:
            _log.info(
                "keras_dist sends gradients in buckets of %d MiB, %s", comm.bucket_nbytes >> 20, how
            )
    return comm.bucket_nbytes
