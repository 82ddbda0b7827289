"""A callback that reports epochs to Ray Train, with checkpoints."""

import pathlib
from typing import Any

import numpy as np
import ray.train

from keras_dist import runtime
from keras_dist.training.session_callback import SessionCallback


class ReportCallback(SessionCallback):
    """Reports the metrics of each epoch to Ray Train, and files of callbacks as its checkpoint.

    The checkpoint is a directory that callbacks before this one write to, such as
    `BackupAndRestore` and `ModelCheckpoint`. Ray Train copies it to the storage of the run. When
    Ray has started the workers again, this callback fetches the latest checkpoint, and training
    resumes from the backup in it.

    Collective: every rank must pass the callback to `fit`, behind those that write.

    Args:
        directory: local directory of the files, which only the root needs. Defaults to `None`: no
            checkpoints.

    Example:
    ```python
    backup = keras_dist.callbacks.BackupAndRestore("state/backup")
    report = keras_dist.ray.ReportCallback("state")
    ...
    model.fit(dataset, epochs=10, callbacks=keras_dist.callbacks(backup, report))
    ```
    """

    def __init__(self, directory: str | None = None):
        super().__init__()
        self._directory = None
        if directory is not None and runtime.rank() == 0:
            self._directory = pathlib.Path(directory)
            checkpoint = ray.train.get_checkpoint()
            if checkpoint is not None:
                checkpoint.to_directory(directory)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the logs of the epoch when all callbacks have written; waits for all ranks."""
        metrics = {name: np.asarray(value).tolist() for name, value in (logs or {}).items()}
        self.session.after_hook(lambda: self._report({"epoch": epoch + 1, **metrics}))

    def _report(self, metrics: dict[str, Any]) -> None:
        checkpoint = None
        if self._directory is not None and self._directory.is_dir():
            checkpoint = ray.train.Checkpoint.from_directory(str(self._directory))
        ray.train.report(metrics, checkpoint=checkpoint)
