"""Averaging of non-trainable weights, such as moving statistics."""

from typing import Any

from keras_dist.training.replicas import average_statistics
from keras_dist.training.session_callback import VALIDATION, SessionCallback


class AverageStatisticsCallback(SessionCallback):
    """Averages moving statistics, such as those of batch normalization, over the ranks.

    Each rank updates moving statistics from its own batches. The callback averages them before
    each validation and at the end of each epoch, so that every rank validates and saves the same
    model. Other non-trainable weights that differ between ranks are averaged as well, see
    `keras_dist.training.replicas.average_statistics`.

    Collective: every rank must pass the callback to `fit`.
    """

    agrees_on = VALIDATION

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Averages before validation."""
        if self.model.built:
            average_statistics(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages before callbacks save the model."""
        average_statistics(self.model)
