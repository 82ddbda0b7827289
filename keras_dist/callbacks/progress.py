"""How far this rank is, noted for those who watch the job."""

from typing import Any

import keras

from keras_dist import _engine
from keras_dist.callbacks.throughput import count_samples

__all__ = ["ProgressCallback"]


class ProgressCallback(keras.callbacks.Callback):
    """Notes steps, samples and logs of a fit, which `keras-dist top` and the like show.

    It costs a few stores a step, no meeting, and reads nothing from the device but, once an
    epoch, how many samples Keras has weighted the loss by. What it notes of metrics is what the
    callbacks before it have left in the logs: within an epoch those of this rank, at its end
    those of all.
    """

    # Its hook at batches may run in any thread, and must not make those of others wait.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._counts = False  # whether the samples of this epoch are still to be counted

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes how much there is to do, as far as Keras knows."""
        noted = _engine.progress.progress()
        noted.step, noted.epochs, noted.steps = 0, self.params["epochs"], self.params["steps"]
        self._counts = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes a step. `self.model` would copy the state of a JAX model at every batch."""
        _engine.progress.note_step(batch + 1)
        _engine.progress.progress().logs = logs or {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts samples, before validation counts its own."""
        self._count()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts samples, and notes the metrics of the epoch."""
        self._count()
        _engine.progress.progress().logs = dict(logs or {})

    def _count(self) -> None:
        noted = _engine.progress.progress()
        steps = self.params.get("steps") or noted.step
        if self._counts and steps:
            self._counts = False
            noted.samples_per_step = count_samples(self.model) / steps or None
