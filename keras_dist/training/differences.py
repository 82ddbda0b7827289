"""Differences between ranks, found by digests."""

from collections.abc import Mapping, Sequence

import numpy as np

from keras_dist import _engine

DIGEST_NBYTES = 16


def differing(comm: _engine.Communicator, digests: Sequence[bytes]) -> dict[int, list[int]]:
    """Returns the ranks that differ from rank 0, by index of the digest.

    Args:
        digests: `DIGEST_NBYTES` bytes for each variable and layer.
    """
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(1, -1, DIGEST_NBYTES)
    gathered = _engine.collectives.allgather(comm, mine, f"the digests of {len(digests)} variables")
    differs = (gathered != gathered[:1]).any(axis=2)  # shape (ranks, variables)
    return {
        int(index): np.flatnonzero(differs[:, index]).tolist()
        for index in np.flatnonzero(differs.any(axis=0))
    }


def described(names: Sequence[str], different: Mapping[int, Sequence[int]]) -> str:
    """Returns a phrase that names at most eight differences, by index, and their ranks."""
    found = [f"{names[at]} (ranks {', '.join(map(str, ranks))})" for at, ranks in different.items()]
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"differences from rank 0 in {'; '.join(found[:8])}{more}"
