"""Progress and throughput of training: in logs, for the monitor, and as TensorBoard scalars."""

import importlib.util
import os
import threading
import time
from pathlib import Path
from time import perf_counter
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.metrics import samples_weighted
from keras_dist.monitor import endpoints
from keras_dist.monitor.report import Job
from keras_dist.training.rank_exchanges import allreduce
from keras_dist.training.session_callback import SessionCallback

SUMS = "the throughput of an epoch"


class Throughput(SessionCallback):
    """Adds the throughput of all ranks and their waiting time to the logs of an epoch.

    - `samples_per_second`: samples per second of all ranks together.
    - `steps_per_second`: steps per second, instead of `samples_per_second`, if a custom
      `train_step` does not count samples in the metric `loss`.
    - `waiting`: fraction of the time, from 0 to 1, that a rank waits for other ranks or for data
      between nodes; the mean of all ranks. One slow rank of 4 results in up to 0.75. Waits for
      queued operations in background threads count as well.

    The time is measured from the beginning of the epoch to the end of its last step. It excludes
    validation and other callbacks at the end of an epoch. The first epoch, and on JAX the second,
    includes tracing and compilation.

    The values appear in the progress bar at the end of an epoch and in the logs of later callbacks.
    `keras_dist.callbacks(throughput=True)` puts the callback before user callbacks such as
    `CSVLogger`.

    During an epoch the progress bar shows values of the root: its `waiting`, and from the second
    epoch on its speed, based on the samples per step of the previous epoch. The overhead is reading
    two clocks per step, without collectives or reads from the device.

    Collective: every rank must pass the callback to `fit`. It costs a small allreduce per epoch.
    """

    # The batch hook is thread-safe; Keras may call it asynchronously.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._awaits_first = False
        self._resumed = [0.0, 0]  # samples and steps of this epoch that an earlier run has trained
        self._counted: list[float] = []
        self._began: tuple[float, float] | None = None
        self._last: tuple[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps, self._awaits_first, self._resumed = 0, True, [0.0, 0]
        self._began = _clocks()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Restarts the clock if training resumes within an epoch."""
        if self._awaits_first and batch > 0:
            self._resumed = [count_samples(self.model), batch]
            self._began = _clocks()
        self._awaits_first = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps and adds the current speed to the logs.

        Avoids `self.model`, which copies the state of a JAX model.
        """
        self._steps = max(self._steps, batch + 1)
        since = self._began
        if since is None or logs is None:
            return
        seconds, waited = _since(since)
        if self._last is not None:
            name, for_each_step = self._last
            logs[name] = for_each_step * (self._steps - self._resumed[1]) / seconds
        logs["waiting"] = min(waited / seconds, 1.0)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values of all ranks to the logs."""
        self._stop()
        # With steps_per_execution, Keras passes the last step of a full execution.
        steps = min(self._steps, self.planned.get("steps") or self._steps)
        mine = np.array([*self._counted, steps - self._resumed[1]], np.float64)
        comm = runtime.fit_communicator()
        samples, seconds, waited, steps = allreduce(comm, [mine], [SUMS])[0].tolist()
        if samples > steps or type(self.model).train_step is keras.Model.train_step:
            name, speed = "samples_per_second", samples * comm.size / seconds
        else:
            name, speed = "steps_per_second", steps / seconds
        self._last = (name, speed * seconds / steps) if steps else None
        if logs is not None:
            logs.update({name: speed, "waiting": min(waited / seconds, 1.0)})

    def _stop(self) -> None:
        """Stops the clock and counts the samples of this rank, once per epoch."""
        if self._began is None:
            return
        # The count first: on an accelerator, reading it waits for the steps.
        samples = 0.0 if self._awaits_first else count_samples(self.model)
        self._counted = [samples - self._resumed[0], *_since(self._began)]
        self._began = None


def _clocks() -> tuple[float, float]:
    """Returns the time and the time that this rank has waited for others, in seconds."""
    return perf_counter(), _engine.wait.waited_seconds()


def _since(earlier: tuple[float, float]) -> tuple[float, float]:
    """Returns the differences of both clocks to `earlier`, in seconds."""
    seconds, waited = _clocks()
    return seconds - earlier[0], waited - earlier[1]


def count_samples(model: keras.Model) -> float:
    """Returns the number of samples in Keras' loss metric of this epoch, 0 without the metric."""
    loss = next((metric for metric in model.metrics if metric.name == "loss"), None)
    count = samples_weighted(loss)
    return 0.0 if count is None else float(keras.ops.convert_to_numpy(count))


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
        noted.step = 0
        noted.epochs, noted.steps = self.planned.get("epochs"), self.planned.get("steps")
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
        steps = self.planned.get("steps") or noted.step
        if self._counts and steps:
            self._counts = False
            noted.samples_per_step = count_samples(self.model) / steps or None


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
            remedy = "Leave that variable out."
            raise errors.ArgumentError("a job that can be watched", "KERAS_DIST_TOP=0", remedy)
        if importlib.util.find_spec("tensorflow") is None:
            raise errors.ArgumentError(
                "TensorFlow, which writes files for TensorBoard",
                "none",
                "pip install tensorflow-cpu, or use KERAS_DIST_PROMETHEUS_PORT.",
            )
        self.directory, self.seconds = Path(directory), seconds
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the thread of an earlier `fit`, which has raised."""
        self.on_train_end()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to write, on the root; on another one where that has died."""
        if runtime.rank() == 0 and self._thread is None:
            self._ends.clear()
            self._thread = threading.Thread(
                target=self._run, name="keras_dist scalars", daemon=True
            )
            self._thread.start()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
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
                write(step=job.rows[0].done, summary=summary)


def _scalars(job: Job) -> dict[str, float]:
    """Returns what is known of a job by the names of TensorBoard, which groups them by prefix."""
    found: dict[str, float | None] = {"samples_per_second": job.samples_per_second}
    found |= job.rows[0].logs
    for report in job.rows:
        gpu = report.gpu
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
