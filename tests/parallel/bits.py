"""How tests compare large results of the ranks to the bit."""

import hashlib

import keras_dist


def equal_on_all(*results):
    """Returns whether results, as bytes, are the same on all ranks: their digests travel."""
    digests = tuple(hashlib.blake2b(result).digest() for result in results)
    return len(set(keras_dist.allgather_object(digests))) == 1
