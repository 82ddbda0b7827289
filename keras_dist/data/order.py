"""In which order the samples of an epoch come: a function of seed and epoch, and nothing else."""

import dataclasses
from typing import Literal

import numpy as np

from keras_dist.data.partition import Plan

__all__ = ["Order", "Shuffle", "Way"]

Shuffle = bool | Literal["global"]
Way = Literal["rank", "global", "draw"]


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a data set, over all its epochs.

    Args:
        way: `"rank"`: each rank has an order of its part. `"global"`: the whole has one, of which
            rank r takes what comes at places `r`, `r + size`, ...: it is the same for any number
            of ranks. `"draw"`: each rank draws from the whole, with replacement, from a stream of
            its own. `None`: the order of the data.
        seed: one number for the job.
        total: number of samples.
    """

    way: Way | None
    seed: int
    total: int

    @property
    def knows_ranks(self) -> bool:
        """Whether another number of ranks would see another order."""
        return self.way in ("rank", "draw")

    def of(self, plan: Plan, epoch: int) -> np.ndarray:
        """Returns the indices of the samples that an epoch of a rank consists of, in order.

        Args:
            plan: the part of that rank.
            epoch: number of the epoch.

        Returns:
            int64 array of shape `(plan.count,)`.
        """
        if self.way == "draw":
            # The stream of SeedSequence.spawn, reached without spawning those before.
            stream = np.random.SeedSequence(self.seed, spawn_key=(plan.rank, epoch))
            return np.random.default_rng(stream).integers(self.total, size=plan.count)
        if self.way == "rank":
            return plan.order(self.seed, epoch)
        places = plan.order(None, epoch)
        if self.way == "global":
            return np.random.default_rng([self.seed, epoch]).permutation(self.total)[places]
        return places
