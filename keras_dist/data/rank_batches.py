"""What a source makes of its data: one rank's batches, by epoch and step."""

from typing import Any, Protocol

from keras_dist.data.epochs import Epochs
from keras_dist.data.partition import Plan, Spread

__all__ = ["RankBatches"]


class RankBatches(Protocol):
    """One rank's batches, for any epoch."""

    epochs: Epochs

    @property
    def plan(self) -> Plan | Spread:
        """How many steps an epoch has, and what they take."""

    @property
    def example(self) -> Any:
        """What has the dtypes of a batch and its shapes but for the first axis, nested like it.

        `None` where batches may differ in them.
        """

    @property
    def sizes(self) -> set[int]:
        """The numbers of samples that batches may have; none where they may change."""

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the samples of a step, nested like the data."""
