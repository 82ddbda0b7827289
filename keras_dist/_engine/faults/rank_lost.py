"""The error of a rank that has seen others die."""

from collections.abc import Sequence

from keras_dist import errors

__all__ = ["have", "lost"]


def lost(where: str, ranks: Sequence[int]) -> errors.RankLostError:
    """Returns the error of a rank that has seen others die."""
    return errors.RankLostError(
        errors.explain(
            where,
            "all ranks to come",
            f"{have(ranks)} died",
            "Its last words, or the log of the system (out of memory) or of the batch system, "
            "tell why. KERAS_DIST_ON_FAILURE=continue goes on without it.",
        )
    )


def have(ranks: Sequence[int]) -> str:
    """Returns the subject of a sentence on ranks, such as `rank 1 has`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"
