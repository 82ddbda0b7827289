"""Resumption within an epoch: batches that were trained on are read, without training or hooks."""

import logging
from collections.abc import Mapping
from typing import Any

import keras

from keras_dist import _backends, _engine, runtime
from keras_dist.callbacks import rank_states
from keras_dist.callbacks.callback_list import SharedCallbackList
from keras_dist.callbacks.fit_state import FitState
from keras_dist.callbacks.random_state import RandomState
from keras_dist.storage.versioned_backups import REMEDY
from keras_dist.training.model_state import SKIPPING

_log = logging.getLogger("keras_dist")


def end_at_once(epoch: int, epochs: int) -> int:
    """Returns the initial epoch of a fit that trains no epoch, and logs a warning on rank 0."""
    if runtime.rank() == 0:
        _log.warning(
            "keras_dist: training was stopped after epoch %d, as the backup says: no epoch is "
            "trained. %s",
            epoch,
            REMEDY,
        )
    return max(epoch, epochs)


class ResumedEpoch:
    """Skips the first batches of a fit: reads them without training."""

    def __init__(
        self,
        model: keras.Model,
        fit: FitState,
        random: RandomState,
        found: Mapping[str, Any],
        callbacks: SharedCallbackList | None,
    ):
        self._model, self._fit, self._callbacks = model, fit, callbacks
        self._random = random
        self._stopped = found["stopped"]
        self._states = fit.ranks()
        self._logs = rank_states.of_rank(self._states)["logs"] if self._states else {}
        self._execution_steps = model.steps_per_execution
        self._executions, repeated = divmod(found["step"], self._execution_steps)
        self._skipped = found["step"] - repeated
        if repeated and runtime.rank() == 0:
            _log.warning(
                "%d batches are trained on twice: the backup was written after %d batches of an "
                "epoch, which is no multiple of steps_per_execution=%d.",
                repeated,
                found["step"],
                self._execution_steps,
            )
        self._train_function = model.train_function
        self._wants_metrics = found["step"] > 0 and bool(self._states)
        if found["step"]:
            model.train_function = self._first_steps
            object.__setattr__(model, SKIPPING, self.end)

    def begin(self) -> None:
        """Reverts changes that callbacks made in `on_epoch_begin`, and starts to skip."""
        self._fit.restore_callbacks()
        if self._stopped:
            self._model.stop_training = True
        self._restore_metrics()
        if self._callbacks is not None:
            self._callbacks.skip(self._skipped, self._logs)
        if not self._executions:
            self._random.skipped()
        if self._skipped:
            # Skipped steps do not count as done by this process.
            _engine.progress.progress().step = self._skipped

    def end(self) -> None:
        """Restores the train function, even if this rank had fewer batches than were skipped."""
        if self._model.train_function == self._first_steps:
            self._model.train_function = self._train_function
            if self._executions:
                self._random.skipped()

    def _first_steps(self, *arguments: Any) -> Any:
        if self._wants_metrics:
            # TensorFlow creates metrics when it traces the first step.
            _backends.active().build_from(self._model, arguments[-1])
            self._restore_metrics()
            self._warn_of_other_metrics()
        if self._executions == 0:
            self.end()
            return self._train_function(*arguments)
        self._executions -= 1
        logs = _backends.active().skip_batches(self._execution_steps, self._logs, *arguments)
        if self._executions == 0:
            self._random.skipped()
        return logs

    def _warn_of_other_metrics(self) -> None:
        if self._wants_metrics and runtime.rank() == 0:
            _log.warning(
                "keras_dist: the metrics of the backup differ from those of this model. Metrics "
                "of the resumed epoch include only batches from here on."
            )
        self._wants_metrics = False

    def _restore_metrics(self) -> None:
        if self._wants_metrics and rank_states.restore_metrics(self._model, self._states):
            self._wants_metrics = False
