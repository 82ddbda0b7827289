"""The protocol of the batches of a rank, by epoch and step."""

from typing import Any, Protocol

from keras_dist.data.epochs import Epochs
from keras_dist.data.partition import Plan
from keras_dist.data.spread import Spread


class RankBatches(Protocol):
    """The batches of a rank in any epoch."""

    epochs: Epochs

    @property
    def plan(self) -> Plan | Spread:
        """Number and sizes of the batches of an epoch."""

    @property
    def example(self) -> Any:
        """Arrays in the structure of a batch, with its dtypes and shapes except the first axis.

        `None` if batches may differ in them.
        """

    @property
    def sizes(self) -> set[int]:
        """The possible numbers of samples of a batch; empty if they may change."""

    def batch(self, epoch: int, step: int) -> Any:
        """Returns new arrays with the samples of a step, in the structure of the data."""
