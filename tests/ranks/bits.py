"""Bitwise comparison of large results between ranks."""

import hashlib

import keras_dist


def equal_on_all(*results):
    """Returns whether the bytes of results are equal on all ranks, by their digests."""
    digests = tuple(hashlib.blake2b(result).digest() for result in results)
    return len(set(keras_dist.allgather_object(digests))) == 1
