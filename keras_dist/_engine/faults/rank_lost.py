"""The error of a rank that has seen other ranks die."""

from collections.abc import Sequence

from keras_dist import errors


def lost(where: str, ranks: Sequence[int]) -> errors.RankLostError:
    """Returns the error of a rank that has seen other ranks die."""
    return errors.RankLostError(
        where,
        "all ranks to come",
        f"{have(ranks)} died",
        "See its last output, the system log (out of memory) or the log of the batch system. "
        "KERAS_DIST_ON_FAILURE=continue continues without it.",
    )


def have(ranks: Sequence[int]) -> str:
    """Returns the subject of a sentence on ranks, such as `rank 1 has`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"
