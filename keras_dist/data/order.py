"""The order of the samples of an epoch, a function of the seed and the epoch."""

import dataclasses
from typing import Literal

import numpy as np

from keras_dist.data.partition import Plan

Shuffle = bool | Literal["global"]
Way = Literal["rank", "global", "draw"]


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a data set in all its epochs."""

    way: Way | None
    seed: int
    total: int

    @property
    def knows_ranks(self) -> bool:
        """Whether the order depends on the number of ranks."""
        return self.way in ("rank", "draw")

    def of(self, plan: Plan, epoch: int) -> np.ndarray:
        """Returns the indices of the samples of a rank in an epoch, in order.

        Returns:
            int64 array of shape `(plan.count,)`.
        """
        if self.way == "draw":
            # The stream of SeedSequence.spawn, without spawning the streams before it.
            stream = np.random.SeedSequence(self.seed, spawn_key=(plan.rank, epoch))
            return np.random.default_rng(stream).integers(self.total, size=plan.count)
        if self.way == "rank":
            return plan.order(self.seed, epoch)
        indices = plan.order(None, epoch)
        if self.way == "global":
            return np.random.default_rng([self.seed, epoch]).permutation(self.total)[indices]
        return indices
