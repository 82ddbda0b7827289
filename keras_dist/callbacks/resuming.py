"""The base of callbacks that save training in progress, and the place where a fit resumes."""

import functools
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.callbacks import KerasBackup, model_of
from keras_dist._compat.keras.models import has_weights, initial_epoch_from
from keras_dist.callbacks.callback_states import CallbackStates
from keras_dist.callbacks.metrics import number_of
from keras_dist.callbacks.verification import ENDING, are_replicas, verify_before_writing
from keras_dist.data import epochs
from keras_dist.data.fit_data import restarted
from keras_dist.resume import state
from keras_dist.resume.format import REMEDY
from keras_dist.resume.rank_states import CompressionErrors, OwnSteps
from keras_dist.resume.stores import Store
from keras_dist.training.fit_session import FitSession, is_stopped
from keras_dist.training.model_state import shared_state
from keras_dist.training.rank_exchanges import allgather_object
from keras_dist.training.replicas import verify_sums
from keras_dist.training.session_callback import SessionCallback

_log = logging.getLogger("keras_dist")


class ResumingCallback(SessionCallback, KerasBackup):
    """Saves the training in progress in generations, and begins `fit` with the newest."""

    def __init__(
        self, directory: Any, *args: Any, stored: dict[str, Any], root_rank: int, **kwargs: Any
    ):
        runtime.communicator().index_of_root(root_rank)
        super().__init__(str(directory), *args, **kwargs)
        self.root_rank = root_rank
        self._store = Store(pathlib.Path(self.backup_dir), root_rank, **stored)
        # Trained batches of this epoch; whether on_epoch_begin of this epoch has been called.
        self._step, self._has_begun = 0, False
        self._resumed: ResumedEpoch | None = None
        self._config: str | None = None
        self._list_resumables(())

    def _list_resumables(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Lists what has a state besides variables."""
        model = model_of(self)
        self._callbacks = CallbackStates(callbacks, self.root_rank)
        self._statistics, self._random = state.Statistics(model), state.Generators()
        self._data, seeds = state.DataPosition(), state.Seeds(model, self.root_rank)
        logs, metrics = state.LastLogs(self._numbers_in_logs), state.Metrics(model)
        own = OwnSteps(model), CompressionErrors(model)
        others = seeds, self._statistics, metrics, logs, self._data, self._random
        self._fit = state.FitState(self._callbacks, *others, *own)

    def enter(self, session: FitSession) -> None:
        """Finds the newest generation before other callbacks change their files."""
        session.backups.append(self)
        self._list_resumables(session.callbacks)
        self._store.root_rank = self.root_rank  # which may be that of a process set
        resumes = self._store.find()
        if runtime.rank() == self.root_rank:
            warn_of_restarting_data()
            self._callbacks.warn_of_unsaved()
        self._callbacks.agree(resumes)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the newest generation on all ranks, if there is one."""
        optimizer = self.model.optimizer
        if has_weights(self.model) and optimizer is not None and not optimizer.built:
            # As on torch, JAX and several ranks: the saved state must not depend on the job's size.
            optimizer.build(self.model.trainable_variables)
        found = self._restore_model()
        # Clears the initial epoch of an earlier fit of this model, which may have failed.
        initial_epoch_from(self.model, None)
        self._store.written = self._resumed = self._config = None
        self._step, self._has_begun = 0, False
        if has_weights(self.model):
            self._store.begin(self.model, self._equal())
        if found is None:
            return
        initial_epoch_from(self.model, found["epoch"])
        self._store.written = found["epoch"], found["step"]
        found["step"] = steps_now(found, warns=runtime.rank() == self.root_rank)
        self._fit.take(state.DataPosition.key, state.Generators.key)
        self.session.after_hook(functools.partial(self._fit.take_on_all, CallbackStates.key))
        if found["begun"]:
            self._step = found["step"]
            self._resumed = ResumedEpoch(self.session, self._fit, self._random, found)
        elif found["stopped"]:
            initial_epoch_from(
                self.model, end_at_once(found["epoch"], self.planned.get("epochs") or 0)
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch for generations within it."""
        self._keras_dist_epoch = epoch  # Keras counts from 0 until an epoch ends
        self._data.note()
        self._random.begin_epoch()
        self._store.begin_epoch()
        self._has_begun = True
        if self._resumed is not None:
            self.session.after_hook(functools.partial(self._resume_epoch, self._resumed))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the batch and writes a generation if `save_freq` is reached."""
        self._step = batch + 1
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a generation that resumes at the next epoch, unless `save_freq` is a number."""
        self._data.note()
        self._random.end_epoch()
        self._step, self._has_begun, self._resumed = 0, False, None
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the generations if `delete_checkpoint` is set; waits until the last is whole."""
        initial_epoch_from(self.model, None)  # otherwise the next fit would start at that epoch
        if self.delete_checkpoint:
            verify_before_writing(self.model, ENDING)
            try:
                self._store.remove()
            except errors.CheckpointError as error:  # training has ended well
                runtime.notify(str(error))
        self._store.end()

    def save_now(self) -> bool:
        """Writes a generation of the current step, unless there is one. Collective; blocks."""
        self._store.settle()
        # Ranks that are out of data have trained fewer.
        self._step = max(allgather_object(self._step, "the place of a backup"))
        if self._store.written != (self._keras_dist_epoch, self._step):
            self._back_up()
            self._store.settle()
        return self._store.written == (self._keras_dist_epoch, self._step)

    def _keras_dist_save(self) -> None:
        # Later callbacks of the list have not run the current hook yet.
        self.session.after_hook(self._back_up)

    def _back_up(self) -> None:
        check = verify_sums if self._store.by_all else None
        self._statistics.values = verify_before_writing(self.model, check=check)
        add_states = functools.partial(self._fit.write, self._fit.gather())
        moment = self._keras_dist_epoch, self._step
        self._store.write(self.model, self._equal(), moment, self._describe(), add_states)
        # The file has the averages. Training continues as without a backup.
        self._statistics.assign(self._statistics.values)

    def _equal(self) -> list[Any]:
        """Returns the variables that are equal on all ranks."""
        return shared_state(self.model) if are_replicas(self.model) else []

    def _restore_model(self) -> dict[str, Any] | None:
        """Restores the model on all ranks; returns what the manifest says, or `None`."""
        found = self._store.read(self.model)
        if found is None:
            return None
        about, self._fit.found = found
        own = OwnSteps.key, CompressionErrors.key
        self._fit.take(state.Seeds.key, state.Statistics.key, *own)
        return dict(about)

    def _resume_epoch(self, resumed: "ResumedEpoch") -> None:
        self._restore_model()  # callbacks may have changed the learning rate
        resumed.begin()

    def _numbers_in_logs(self) -> dict[str, float]:
        numbers = {name: number_of(value) for name, value in self.session.last_logs.items()}
        return {n: float(v) for n, v in numbers.items() if v is not None and v.ndim == 0}

    def _describe(self) -> dict[str, Any]:
        """Returns the place of the fit and the model, as JSON."""
        if self._config is None:
            self._config = _config_of(self.model)
        return {
            "epoch": self._keras_dist_epoch,
            "step": self._step,
            "begun": self._has_begun,
            "stopped": is_stopped(self.model),
            "ranks": runtime.fit_size(),
            "global_batch": global_batch(),
            "model": self._config,
        }


def _config_of(model: keras.Model) -> str | None:
    """Returns the configuration of a model as JSON, if it has one, for `export`."""
    try:
        return model.to_json()
    except Exception as error:  # of a user's class
        _log.debug("keras_dist: model %r has no configuration: %s", model.name, error)
        return None


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
        self,
        session: FitSession,
        fit: state.FitState,
        random: state.Generators,
        found: Mapping[str, Any],
    ):
        self._session, self._fit, self._random = session, fit, random
        self._stopped = found["stopped"]
        self.logs = state.own(fit.ranks())[state.LastLogs.key]
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
        if self._wants_metrics and self._fit.take(state.Metrics.key):
            self._wants_metrics = False


def global_batch() -> int | None:
    """Returns the global batch size if the order of samples is independent of `size()`."""
    data = epochs.of(epochs.fits.get().arguments.get("x"))
    return data.global_batch if data is not None else None


def steps_now(about: dict[str, Any], warns: bool) -> int:
    """Converts the step of a backup to the global batch size of this job."""
    log = _log.warning if warns else _log.debug
    step, before, now = about["step"], about.get("global_batch"), global_batch()
    if before and now and before != now:
        step, again = divmod(step * before, now)
        if again:
            log(
                "%d samples of epoch %d are trained on twice: the backup was written after a "
                "number of samples that is no multiple of the global batch size, %d.",
                again,
                about["epoch"] + 1,
                now,
            )
    elif step and not now and about.get("ranks", runtime.fit_size()) != runtime.fit_size():
        log(
            "The backup was written by %d ranks and its epoch resumes on %d, in a different order "
            "of data: samples may be repeated or skipped. Use "
            "keras_dist.data.shard(..., shuffle='global'), whose order is the same for any number "
            "of ranks.",
            about["ranks"],
            runtime.fit_size(),
        )
    return step


def warn_of_restarting_data() -> None:
    """Warns of data whose order cannot be resumed."""
    found = restarted(epochs.fits.get().arguments, keras.backend.backend())
    if found:
        _log.warning(
            "keras_dist: a backup does not keep %s: data restarts when training resumes, which "
            "then ends with different weights. Use keras_dist.data.shard(...) on data before it is "
            "shuffled, and omit steps_per_epoch: its order can be resumed.",
            "; nor ".join(found),
        )
