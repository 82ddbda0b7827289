"""Resumption within an epoch: batches that were trained on are read, without training or hooks."""

import logging
from collections.abc import Mapping
from typing import Any

from keras_dist import _backends, _engine, runtime
from keras_dist.callbacks.callback_states import CallbackStates
from keras_dist.resume.format import REMEDY
from keras_dist.resume.state import FitState, Generators, LastLogs, Metrics, own
from keras_dist.training.fit_session import FitSession

_log = logging.getLogger("keras_dist")


def end_at_once(epoch: int, epochs: int) -> int:
    """Returns the initial epoch of a fit that trains no epoch, and logs a warning on rank 0."""
    if runtime.fit_rank() == 0:
        _log.warning(
            "keras_dist: training was stopped after epoch %d, as the backup says: no epoch is "
            "trained. %s",
            epoch,
            REMEDY,
        )
    return max(epoch, epochs)


class ResumedEpoch:
    """The first batches of a fit, which are read without training."""

    def __init__(
        self, session: FitSession, fit: FitState, random: Generators, found: Mapping[str, Any]
    ):
        self._session, self._fit, self._random = session, fit, random
        self._stopped = found["stopped"]
        self.logs = own(fit.ranks())[LastLogs.key]
        execution_steps = session.model.steps_per_execution
        self._executions, repeated = divmod(found["step"], execution_steps)
        #: number of batches that are read; whether there are more steps that are not for training
        self.batches, self.is_left = found["step"] - repeated, True
        if repeated and runtime.fit_rank() == 0:
            _log.warning(
                "%d batches are trained on twice: the backup was written after %d batches of an "
                "epoch, which is no multiple of steps_per_execution=%d.",
                repeated,
                found["step"],
                execution_steps,
            )
        self._wants_metrics = found["step"] > 0

    def begin(self) -> None:
        """Reverts changes that callbacks made in `on_epoch_begin`, and starts to skip."""
        self._fit.take_on_all(CallbackStates.key)
        if self._stopped:
            self._session.model.stop_training = True
        self._restore_metrics()
        self._session.resume(self)
        if not self._executions:
            self._random.skipped()
        if self.batches:
            # Skipped steps do not count as done by this process.
            _engine.progress.progress().step = self.batches

    def skip(self, *arguments: Any) -> Any:
        """Reads the batches of a step and returns its result; `None` if it is one of training."""
        model, backend = self._session.model, _backends.active()
        if self._wants_metrics:
            # TensorFlow creates metrics when it traces the first step.
            backend.build_from(model, arguments[-1])
            self._restore_metrics()
            if self._wants_metrics and runtime.fit_rank() == 0:
                _log.warning(
                    "keras_dist: the metrics of the backup differ from those of this model. "
                    "Metrics of the resumed epoch include only batches from here on."
                )
            self._wants_metrics = False
        if not self._executions:
            self.is_left = False
            return None
        self._executions -= 1
        logs = backend.skip_batches(model.steps_per_execution, self.logs, *arguments)
        if not self._executions:
            self._random.skipped()
        return logs

    def end(self) -> None:
        """Ends the epoch, in which this rank may have had fewer batches than were to be read."""
        if self._executions:
            self._random.skipped()

    def _restore_metrics(self) -> None:
        if self._wants_metrics and self._fit.take(Metrics.key):
            self._wants_metrics = False
