"""How many samples all ranks train on in a second, and how long they wait for each other."""

from time import perf_counter
from typing import Any

import keras
import numpy as np

from keras_dist import _engine, runtime
from keras_dist._compat.keras.models import samples_weighted
from keras_dist.ops.bucket_size import bucket_nbytes

__all__ = ["Throughput", "count_samples"]


class Throughput(keras.callbacks.Callback):
    """Adds to the logs of an epoch how fast all ranks trained, and how long they waited.

    - `samples_per_second`: of all ranks together; images per second where samples are images.
    - `steps_per_second` in its place, where a `train_step` of one's own does not count samples in
      the metric that Keras calls `loss`.
    - `waiting`: from 0 to 1, the share of the time in which a rank waited for another one, or for
      data on its way between nodes; the mean of all ranks. One slow rank of 4 shows as up to
      0.75. Waits behind the script's back, for what was queued, count as well.

    The time is that from the begin of the epoch to the end of its last step, so without
    validation and without what other callbacks do at the end of an epoch. The first epoch, on
    JAX the second as well, contains tracing and compilation.

    The progress bar shows them at the end of an epoch, and every callback behind this one sees
    them: `keras_dist.callbacks(throughput=True)` puts it in front of the user's own, so that
    `CSVLogger` and the like write them.

    While an epoch goes on the progress bar shows what the root knows by itself: its own `waiting`,
    and, from the second epoch on, the speed of its steps, each with as many samples as the steps
    of the last epoch had. That costs two looks at clocks a step, no meeting, and nothing is read
    from the device.

    Collective: every rank must pass it to `fit`. It costs one small reduction an epoch.
    """

    # Its hook at batches may run in any thread, and must not make those of others wait.
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
        """Starts the clock anew where an epoch is resumed within."""
        if self._awaits_first and batch > 0:
            self._resumed = [count_samples(self.model), batch]
            self._began = _clocks()
        self._awaits_first = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps, and tells the progress bar of them.

        `self.model` would copy the state of a JAX model at every batch.
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
        """Stops the clock, where validation ends the steps of an epoch."""
        self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds what all ranks have done to the logs."""
        self._stop()
        # Several steps in one execution: Keras gives the last that it had room for.
        steps = min(self._steps, self.params.get("steps") or self._steps)
        samples, seconds, waited, steps = _sums([*self._counted, steps - self._resumed[1]])
        ranks = runtime.size()
        if samples > steps or type(self.model).train_step is keras.Model.train_step:
            name, speed = "samples_per_second", samples * ranks / seconds
        else:
            name, speed = "steps_per_second", steps / seconds
        self._last = (name, speed * seconds / steps) if steps else None
        if logs is not None:
            logs.update({name: speed, "waiting": min(waited / seconds, 1.0)})

    def _stop(self) -> None:
        """Reads what this rank has done, once an epoch."""
        if self._began is None:
            return
        # The count first: on an accelerator it is there when the steps are done.
        samples = 0.0 if self._awaits_first else count_samples(self.model)
        self._counted = [samples - self._resumed[0], *_since(self._began)]
        self._began = None


def _clocks() -> tuple[float, float]:
    """Returns the time, and how long this rank has waited for others."""
    return perf_counter(), _engine.wait.waited_seconds()


def _since(earlier: tuple[float, float]) -> tuple[float, float]:
    """Returns how much both have grown."""
    seconds, waited = _clocks()
    return seconds - earlier[0], waited - earlier[1]


def count_samples(model: keras.Model) -> float:
    """Returns how many samples Keras has weighted the loss of this epoch by, 0 where by none."""
    loss = next((metric for metric in model.metrics if metric.name == "loss"), None)
    count = samples_weighted(loss)
    return 0.0 if count is None else float(keras.ops.convert_to_numpy(count))


def _sums(values: list[float]) -> list[float]:
    """Adds up numbers of all ranks. Collective."""
    comm = runtime.communicator()
    (sums,) = _engine.collectives.allreduce(
        comm,
        [np.array(values, np.float64)],
        ["the throughput of an epoch"],
        _engine.OpOptions(_engine.ReduceOp.SUM),
        bucket_nbytes(comm),
    )
    return sums.tolist()
