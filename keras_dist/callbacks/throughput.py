"""Training throughput of all ranks, and the share of time that ranks wait for each other."""

from time import perf_counter
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, runtime
from keras_dist._compat.keras.metrics import samples_weighted
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.training.session_callback import SessionCallback


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
        """Starts the clock."""
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
        """Stops the clock before validation."""
        self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values of all ranks to the logs."""
        self._stop()
        # With steps_per_execution, Keras passes the last step of a full execution.
        steps = min(self._steps, self.params.get("steps") or self._steps)
        samples, seconds, waited, steps = _sums([*self._counted, steps - self._resumed[1]])
        ranks = runtime.fit_size()
        if samples > steps or type(self.model).train_step is keras.Model.train_step:
            name, speed = "samples_per_second", samples * ranks / seconds
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


def _sums(values: list[float]) -> list[float]:
    """Returns the sums of the values of all ranks. Collective."""
    comm = runtime.fit_communicator()
    (sums,) = _engine.collectives.allreduce(
        comm,
        [np.array(values, np.float64)],
        ["the throughput of an epoch"],
        _engine.OpOptions(_engine.ReduceOp.SUM),
        bucket_nbytes(comm),
    )
    return sums.tolist()
