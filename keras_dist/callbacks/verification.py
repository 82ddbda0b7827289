"""Verification that replicas are equal: during training, at its end and before writes."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import Order
from keras_dist.training.replicas import average_statistics, broadcast_state, verify_once
from keras_dist.training.session_callback import SessionCallback

__all__ = ["ENDING", "VerifyReplicas", "are_replicas", "verify_before_writing"]

WRITING, ENDING = "writing", "the end of a fit"


class VerifyReplicas(SessionCallback):
    """Checks that weights and optimizer state are equal on all ranks.

    The callback checks every `every` epochs and at the end of `fit`. `keras_dist.callbacks()`
    includes an instance that checks at the end of `fit` only. `BackupAndRestore` and
    `ModelCheckpoint` check before each write; to repair replicas before they do, pass
    `VerifyReplicas(repair=True)` in front of them. The checks at the end of `fit` and before
    writes skip models whose optimizers do not reduce over all ranks.

    The ranks exchange digests of 16 bytes per variable. Computing them takes about 0.2 s per
    100 MB of weights and optimizer state. The callback must follow `AverageStatisticsCallback`,
    which makes moving statistics equal, as in `keras_dist.callbacks(VerifyReplicas())`.

    Collective: every rank must pass the callback to `fit`, with the same arguments.

    Args:
        every: number of epochs between checks, or `None` to check at the end of `fit` only.
            Defaults to 1.
        repair: whether to broadcast the root's state with a warning, rather than to raise, if
            the replicas differ. Defaults to `False`.
        root_rank: rank whose state repairs the replicas. Defaults to 0.

    Raises:
        MismatchError: the replicas differ; the message names variables and ranks. Raised on
            every rank, by `fit`.
        ArgumentError: `every` is not a positive integer; `root_rank` is not a rank.
    """

    def __init__(self, every: int | None = 1, repair: bool = False, root_rank: int = 0):
        super().__init__()
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if every is not None and not number:
            raise errors.ArgumentError(
                runtime.where(), "every to be a number of epochs", repr(every), "Pass 1."
            )
        runtime.communicator().index_of_root(root_rank)
        self.every = every
        self.order = Order.VERIFIES if every is None else Order.AS_GIVEN
        self.repair = repair
        self.root_rank = root_rank

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks every `every` epochs."""
        if self.every is not None and (epoch + 1) % self.every == 0:
            self._verify(WRITING)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the final replicas."""
        if are_replicas(self.model):
            self._verify(ENDING)

    def _verify(self, moment: str) -> None:
        try:
            verify_once(self.model, moment)
        except errors.MismatchError as difference:
            if not self.repair:
                raise
            broadcast_state(self.model, self.root_rank)  # raises where the models differ
            if runtime.rank() == self.root_rank:
                warnings.warn(
                    f"{difference} All ranks continue with the state of rank {self.root_rank}.",
                    RuntimeWarning,
                    stacklevel=2,
                )


def verify_before_writing(
    model: keras.Model,
    moment: str = WRITING,
    check: Callable[[keras.Model], None] | None = None,
) -> dict[int, np.ndarray]:
    """Checks replicas before a file is written or removed.

    Averages non-trainable weights first. Does nothing if the optimizers of the model do not
    reduce over all ranks.

    Collective: every rank; blocks.
    """
    if not are_replicas(model):
        return {}
    own = average_statistics(model)
    if check is None:
        verify_once(model, moment)
    else:
        check(model)
    return own


def are_replicas(model: keras.Model) -> bool:
    """Returns whether the distributed optimizers of a model reduce over all ranks."""
    optimizers = distributed_optimizers(model)
    job = runtime.fit_communicator()
    return bool(optimizers) and all(o._keras_dist.communicator() is job for o in optimizers)
