"""Batches of a rank in the form that suits the backend of Keras."""

from typing import Any, Protocol

from keras_dist.data.epochs import Epochs
from keras_dist.data.partition import Plan, Spread

__all__ = ["Batched", "for_keras"]


class Batched(Protocol):
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


def for_keras(batches: Batched, ahead: bool = True) -> Any:
    """Returns batches as data for `fit`.

    A `keras.utils.PyDataset` serves all backends, but on TensorFlow Keras turns it into
    `Dataset.from_generator`. That sets malloc's trim threshold for the whole process:
    from then on memory goes back to the kernel between any two steps and is faulted in
    again, which took 1.7 times the processor time of a small dense model.

    Args:
        batches: those of this rank.
        ahead: whether batches may be made before training asks for them.
    """
    import keras

    if keras.config.backend() == "tensorflow" and batches.example is not None:
        from keras_dist.data.tf_arrays import pipeline_of

        return pipeline_of(batches, ahead)
    from keras_dist.data.array_dataset import ArrayDataset

    return ArrayDataset(batches)
