"""Monitoring values of all ranks as TensorBoard scalars."""

import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import Any

from keras_dist import _engine, errors, runtime
from keras_dist.monitor import endpoints
from keras_dist.monitor.job import Job
from keras_dist.training.session_callback import SessionCallback


class WriteScalars(SessionCallback):
    """Writes the values of `keras-dist top` as TensorBoard scalars during `fit`.

    Scalars of the job are `samples_per_second` and Keras' metrics, such as `loss`. Scalars of each
    rank are `steps_per_second`, `waiting` (a fraction from 0 to 1), `memory_gib`, `gpu_use` and
    `gpu_memory_gib`, if available. The TensorBoard step is the number of steps of the root. A
    background thread of the root collects and writes the values; training does not wait for it.

    Every rank must pass the callback to `fit`. It requires TensorFlow on any backend.

    Args:
        directory: directory of the event files; created if it does not exist.
        seconds: interval between writes in seconds; the callback also writes at the end of
            training. Defaults to 10.

    Raises:
        ArgumentError: monitoring is disabled by `KERAS_DIST_TOP=0`, or TensorFlow is not installed.

    Example:
    ```python
    callbacks = keras_dist.callbacks(keras_dist.callbacks.WriteScalars("logs/ranks"))
    ```
    """

    def __init__(self, directory: str | os.PathLike[str], seconds: float = 10.0):
        super().__init__()
        runtime.communicator()
        if endpoints.current() is None:
            _refuse("a job that can be watched", "KERAS_DIST_TOP=0", "Leave that variable out.")
        if importlib.util.find_spec("tensorflow") is None:
            _refuse(
                "TensorFlow, which writes files for TensorBoard",
                "none",
                "pip install tensorflow-cpu, or use KERAS_DIST_PROMETHEUS_PORT.",
            )
        self.directory, self.seconds = Path(directory), seconds
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to write, on the root; on another one where that has died."""
        if runtime.rank() == 0 and self._thread is None:
            self._ends.clear()
            self._thread = threading.Thread(
                target=self._run, name="keras_dist scalars", daemon=True
            )
            self._thread.start()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes once more."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        import tensorflow as tf

        self.directory.mkdir(parents=True, exist_ok=True)
        suffix = f"{os.uname().nodename}.{os.getpid()}.keras_dist"
        path = self.directory / f"events.out.tfevents.{time.time_ns()}.{suffix}"
        # Records alone: an operation of TensorFlow would take a GPU that another backend uses.
        with tf.io.TFRecordWriter(str(path)) as file:

            def write(**event: Any) -> None:
                made = tf.compat.v1.Event(wall_time=time.time(), **event)
                file.write(made.SerializeToString())
                file.flush()

            write(file_version="brain.Event:2")
            last = False
            while not last and _engine.progress.is_during("fit"):
                last = self._ends.wait(self.seconds)
                watching = endpoints.current()
                if watching is None:
                    return
                job = watching.collector.job()
                values = [
                    tf.compat.v1.Summary.Value(tag=tag, simple_value=value)
                    for tag, value in _scalars(job).items()
                ]
                summary = tf.compat.v1.Summary(value=values)
                write(step=job.rows[0].report.done, summary=summary)


def _scalars(job: Job) -> dict[str, float]:
    """Returns what is known of a job by the names of TensorBoard, which groups them by prefix."""
    found: dict[str, float | None] = {"samples_per_second": job.samples_per_second}
    found |= job.rows[0].report.logs
    for row in job.rows:
        report, gpu = row.report, row.report.gpu
        of_rank = {
            "steps_per_second": report.steps_per_second,
            "waiting": report.waiting,
            "memory_gib": _gib(report.memory_nbytes),
            "gpu_use": gpu.use if gpu else None,
            "gpu_memory_gib": _gib(gpu.memory_nbytes) if gpu else None,
        }
        found |= {f"{name}/rank {report.rank}": value for name, value in of_rank.items()}
    return {tag: value for tag, value in found.items() if value is not None}


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**30


def _refuse(expected: str, received: str, remedy: str) -> None:
    raise errors.ArgumentError(runtime.where(), expected, received, remedy)
