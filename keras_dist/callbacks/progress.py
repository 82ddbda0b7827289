"""Progress of this rank, published to the monitor."""

from typing import Any

from keras_dist import _engine
from keras_dist.callbacks.throughput import count_samples
from keras_dist.training.session_callback import SessionCallback


class ProgressCallback(SessionCallback):
    """Records steps, samples and logs of `fit` for monitors such as `keras-dist top`.

    The overhead is a few assignments per step and no collective. The callback reads one value
    from the device per epoch, the number of samples of Keras' loss metric. Metrics are recorded as
    preceding callbacks leave them in the logs: metrics of this rank within an epoch, metrics of all
    ranks at its end.
    """

    # The batch hook is thread-safe; Keras may call it asynchronously.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._counts = False  # whether samples of this epoch are not counted yet

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the numbers of epochs and steps, as far as Keras knows them."""
        noted = _engine.progress.progress()
        noted.step, noted.epochs, noted.steps = 0, self.params["epochs"], self.params["steps"]
        self._counts = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records a step. Avoids `self.model`, which copies the state of a JAX model."""
        _engine.progress.note_step(batch + 1)
        _engine.progress.progress().logs = logs or {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts samples before validation resets the metric."""
        self._count()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts samples and records the metrics of the epoch."""
        self._count()
        _engine.progress.progress().logs = dict(logs or {})

    def _count(self) -> None:
        noted = _engine.progress.progress()
        steps = self.params.get("steps") or noted.step
        if self._counts and steps:
            self._counts = False
            noted.samples_per_step = count_samples(self.model) / steps or None
