"""An epoch that is resumed within: batches that were learnt are read, and no hook is called."""

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

__all__ = ["ResumedEpoch", "end_at_once"]

_log = logging.getLogger("keras_dist")


def end_at_once(epoch: int, epochs: int) -> int:
    """Returns the epoch with which a fit begins that trains none, and says so on rank 0.

    Args:
        epoch: the number of epochs that were trained when a callback stopped training.
        epochs: up to which one `fit` trains.
    """
    if runtime.rank() == 0:
        _log.warning(
            "keras_dist: training was stopped after epoch %d, as the backup says: no epoch is "
            "trained. %s",
            epoch,
            REMEDY,
        )
    return max(epoch, epochs)


class ResumedEpoch:
    """Skips the first batches of a fit: they are read, and not trained on.

    Args:
        model: the model, which has its train function.
        fit: the state of the fit, with what a backup holds of it.
        random: the random numbers of the fit, likewise.
        found: `step`, the batches that were learnt, and `stopped`, from that backup.
        callbacks: the list of callbacks; `None` where there is none.
    """

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
        self._at_once = model.steps_per_execution
        self._executions, again = divmod(found["step"], self._at_once)
        self._skipped = found["step"] - again
        if again and runtime.rank() == 0:
            _log.warning(
                "%d batches are learnt twice: the backup was written after %d of an epoch, which "
                "is no multiple of steps_per_execution=%d.",
                again,
                found["step"],
                self._at_once,
            )
        self._train_function = model.train_function
        self._wants_metrics = found["step"] > 0 and bool(self._states)
        if found["step"]:
            model.train_function = self._first_steps
            object.__setattr__(model, SKIPPING, self.end)

    def begin(self) -> None:
        """Restores what callbacks have changed at the begin of the epoch, and starts to skip."""
        self._fit.restore_callbacks()
        if self._stopped:
            self._model.stop_training = True
        self._restore_metrics()
        if self._callbacks is not None:
            self._callbacks.skip(self._skipped, self._logs)
        if not self._executions:
            self._random.skipped()
        if self._skipped:
            _engine.progress.progress().step = (
                self._skipped
            )  # they count no more as done by this process

    def end(self) -> None:
        """Restores the train function, also where this rank has fewer batches than were skipped."""
        if self._model.train_function == self._first_steps:
            self._model.train_function = self._train_function
            if self._executions:
                self._random.skipped()

    def _first_steps(self, *arguments: Any) -> Any:
        if self._wants_metrics:
            # TensorFlow makes them with the first step that is traced.
            _backends.active().build_from(self._model, arguments[-1])
            self._restore_metrics()
            self._warn_of_other_metrics()
        if self._executions == 0:
            self.end()
            return self._train_function(*arguments)
        self._executions -= 1
        logs = _backends.active().skip_batches(self._at_once, self._logs, *arguments)
        if self._executions == 0:
            self._random.skipped()
        return logs

    def _warn_of_other_metrics(self) -> None:
        if self._wants_metrics and runtime.rank() == 0:
            _log.warning(
                "keras_dist: the backup holds other metrics than this model has. Those of the "
                "epoch that is resumed count the batches from here on."
            )
        self._wants_metrics = False

    def _restore_metrics(self) -> None:
        if self._wants_metrics and rank_states.restore_metrics(self._model, self._states):
            self._wants_metrics = False
