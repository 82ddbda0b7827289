"""How large buckets are: as the user says, as it is usual, or as the ranks have measured."""

import logging

from keras_dist import _engine, config

__all__ = ["bucket_nbytes"]

_log = logging.getLogger("keras_dist")

USUAL_BUCKET_NBYTES = 25 * 2**20


def bucket_nbytes(
    comm: _engine.Communicator,
    gradients: _engine.CollectiveSignature | None = None,
    nbytes: int = 0,
) -> int:
    """Returns the size in bytes at which a bucket is closed.

    Collective when there are more gradients than one usual bucket holds: then the ranks
    measure, once, unless `KERAS_DIST_BUCKET_NBYTES` is set.

    Args:
        comm: the ranks.
        gradients: what is to be cut into buckets, again and again. Defaults to what is reduced
            now and then.
        nbytes: how many bytes they are.

    Raises:
        MismatchError: the ranks differ in their gradients.
    """
    chosen = config.settings().bucket_nbytes
    if chosen or gradients is None or comm.size == 1 or nbytes <= USUAL_BUCKET_NBYTES:
        return chosen or USUAL_BUCKET_NBYTES
    if comm.bucket_nbytes is None:
        comm.bucket_nbytes, how = _engine.best_bucket_nbytes(comm, gradients, nbytes)
        if comm.rank == 0:
            _log.info(
                "keras_dist sends gradients in buckets of %d MiB, %s", comm.bucket_nbytes >> 20, how
            )
    return comm.bucket_nbytes
