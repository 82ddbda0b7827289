"""Batch sizes for ranks with different numbers of elements. Pure index arithmetic."""

import dataclasses
from collections.abc import Sequence

from keras_dist.data.partition import Remainder


@dataclasses.dataclass(frozen=True)
class Spread:
    """The batches of a rank, where ranks have different numbers of elements."""

    count: int
    sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of batches in an epoch."""
        return len(self.sizes)

    def limited(self, steps: int) -> "Spread":
        """Returns the plan that ends after its first `steps` batches."""
        return Spread(sum(self.sizes[:steps]), self.sizes[:steps])


def plan_spread(
    counts: Sequence[int], rank: int, batch_size: int, remainder: Remainder
) -> Spread | None:
    """Returns the batches of a rank from the numbers of elements of all ranks.

    Returns:
        The plan, or `None` if a rank has fewer elements than steps.
    """
    fewest, most = min(counts), max(counts)
    if fewest == 0:
        return None
    if remainder == "drop":
        batch_size = min(batch_size, fewest)
        steps = fewest // batch_size
        return Spread(steps * batch_size, (batch_size,) * steps)
    steps = -(-most // batch_size)
    if remainder == "pad":
        return Spread(most, (batch_size,) * (steps - 1) + (most - (steps - 1) * batch_size,))
    if fewest < steps:
        return None
    small, larger = divmod(counts[rank], steps)
    return Spread(counts[rank], (small + 1,) * larger + (small,) * (steps - larger))
