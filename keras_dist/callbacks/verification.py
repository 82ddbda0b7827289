"""Replicas that have gone apart are found while training goes on."""

import warnings
from typing import Any

import keras

from keras_dist import errors, runtime
from keras_dist.replicas import broadcast_state, verify_replicas

__all__ = ["VerifyReplicas"]


class VerifyReplicas(keras.callbacks.Callback):
    """Checks at the end of epochs that weights and optimizer state are equal on all ranks.

    Only digests travel, 16 bytes a variable. Weights that training does not touch, such as
    moving statistics, must have been made equal before, so it has to stand behind
    `AverageStatisticsCallback`, as in `keras_dist.callbacks(VerifyReplicas())`.

    Collective: every rank must pass it to `fit`, with the same arguments.

    Args:
        every: epochs from one check to the next. Defaults to 1.
        repair: whether replicas that differ receive the root's state, with a warning, rather
            than ending the training. Defaults to `False`.
        root_rank: the rank from which they are repaired. Defaults to 0.

    Raises:
        MismatchError: the replicas differ; the text names variables and ranks. Raised on
            every rank, by `fit`.
        ArgumentError: `every` is not a positive number, or `root_rank` not a rank.
    """

    def __init__(self, every: int = 1, repair: bool = False, root_rank: int = 0):
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(), "every to be a number of epochs", repr(every), "Pass 1."
                )
            )
        runtime.communicator().place_of_root(root_rank)
        self.every = every
        self.repair = repair
        self.root_rank = root_rank

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks, and repairs where it is to."""
        if (epoch + 1) % self.every:
            return
        try:
            verify_replicas(self.model)
        except errors.MismatchError as difference:
            if not self.repair:
                raise
            broadcast_state(self.model, self.root_rank)  # raises where the models differ
            if runtime.rank() == self.root_rank:
                warnings.warn(
                    f"{difference} All ranks go on with the state of rank {self.root_rank}.",
                    RuntimeWarning,
                    stacklevel=2,
                )
