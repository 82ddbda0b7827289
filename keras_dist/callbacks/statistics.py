"""Weights that training does not touch, such as moving statistics, kept equal."""

from typing import Any

import keras

from keras_dist.training.replicas import average_statistics

__all__ = ["AverageStatisticsCallback"]


class AverageStatisticsCallback(keras.callbacks.Callback):
    """Averages the moving statistics of batch normalisation over the ranks.

    Each rank normalises by its own batches and so gathers its own statistics. They are
    averaged before each validation and at the end of each epoch, so every rank validates
    and saves the same model. Any other weight that is not trained and differs is treated
    alike, see `keras_dist.training.replicas.average_statistics`.

    Collective: every rank must pass it to `fit`.
    """

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Averages before the model is evaluated."""
        if self.model.built:
            average_statistics(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages before the model is saved."""
        average_statistics(self.model)
