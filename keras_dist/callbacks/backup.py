"""Callbacks that save training in progress, from which an interrupted job resumes on all ranks."""

import functools
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import _engine, runtime
from keras_dist._compat.keras.callbacks import BackupAndRestore as KerasBackup
from keras_dist._compat.keras.callbacks import model_of
from keras_dist._compat.keras.models import initial_epoch_from
from keras_dist.callbacks import resumed_data
from keras_dist.callbacks.callback_states import CallbackStates
from keras_dist.callbacks.log_values import number_of
from keras_dist.callbacks.resumed_epoch import ResumedEpoch, end_at_once
from keras_dist.callbacks.verification import ENDING, are_replicas, verify_before_writing
from keras_dist.resume.state import (
    DataPosition,
    FitState,
    Generators,
    LastLogs,
    Metrics,
    Seeds,
    Statistics,
)
from keras_dist.resume.stores import Store
from keras_dist.training.fit_session import FitSession, is_stopped
from keras_dist.training.model_state import has_weights, shared_state
from keras_dist.training.replicas import verify_sums
from keras_dist.training.session_callback import SessionCallback

_log = logging.getLogger("keras_dist")


class ResumingCallback(SessionCallback, KerasBackup):
    """Saves the training in progress in generations, and begins `fit` with the newest."""

    def __init__(
        self,
        directory: Any,
        *args: Any,
        store: Store,
        root_rank: int,
        **kwargs: Any,
    ):
        super().__init__(str(directory), *args, **kwargs)
        self.root_rank, self._store = root_rank, store
        # Trained batches of this epoch; whether on_epoch_begin of this epoch has been called.
        self._step, self._has_begun = 0, False
        self._resumed: ResumedEpoch | None = None
        self._config: str | None = None
        self._list_resumables(())

    def _list_resumables(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Lists what has a state besides variables."""
        model = model_of(self)
        self._callbacks = CallbackStates(callbacks, self.root_rank)
        self._statistics, self._random = Statistics(model), Generators()
        self._data, seeds = DataPosition(), Seeds(model, self.root_rank)
        logs, metrics = LastLogs(self._numbers_in_logs), Metrics(model)
        others = seeds, self._statistics, metrics, logs, self._data, self._random
        self._fit = FitState(self._callbacks, *others)

    def enter(self, session: FitSession) -> None:
        """Finds the newest generation before other callbacks change their files."""
        session.backups.append(self)
        self._list_resumables(session.callbacks)
        self._store.root_rank = self.root_rank  # which may be that of a process set
        resumes = self._store.find()
        if runtime.rank() == self.root_rank:
            resumed_data.warn_of_restarting_data()
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
        found["step"] = resumed_data.steps_now(found, warns=runtime.rank() == self.root_rank)
        self._fit.take(DataPosition.key, Generators.key)
        self.after_hook(self._restore_callbacks)
        if found["begun"]:
            self._step = found["step"]
            self._resumed = ResumedEpoch(self.session, self._fit, self._random, found)
        elif found["stopped"]:
            initial_epoch_from(self.model, end_at_once(found["epoch"], self.params["epochs"]))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch for generations within it."""
        self._keras_dist_epoch = epoch  # Keras counts from 0 until an epoch ends
        self._data.note()
        self._random.begin_epoch()
        self._store.begin_epoch()
        self._has_begun = True
        if self._resumed is not None:
            self.after_hook(functools.partial(self._resume_epoch, self._resumed))

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
            self._store.remove()
        self._store.end()

    def save_now(self) -> bool:
        """Writes a generation of the current step, unless there is one, and waits for it.

        Collective: every rank; blocks.
        """
        self._store.settle()
        steps = _engine.collectives.allgather_object(
            runtime.fit_communicator(), self._step, operation="the place of a backup"
        )
        self._step = max(steps)  # ranks that are out of data have trained fewer
        if self._store.written != (self._keras_dist_epoch, self._step):
            self._back_up()
            self._store.settle()
        return self._store.written == (self._keras_dist_epoch, self._step)

    def _keras_dist_save(self) -> None:
        # Later callbacks of the list have not run the current hook yet.
        self.after_hook(self._back_up)

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
        about, states = found
        self._fit.found(states)
        self._fit.take(Seeds.key, Statistics.key)
        return dict(about)

    def _resume_epoch(self, resumed: ResumedEpoch) -> None:
        self._restore_model()  # callbacks may have changed the learning rate
        resumed.begin()

    def _restore_callbacks(self) -> None:
        self._fit.take_on_all(CallbackStates.key)

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
            "global_batch": resumed_data.global_batch(),
            "model": self._config,
        }


def _config_of(model: keras.Model) -> str | None:
    """Returns the configuration of a model as JSON, if it has one, for `export`."""
    try:
        return model.to_json()
    except Exception as error:  # of a user's class
        _log.debug("keras_dist: model %r has no configuration: %s", model.name, error)
        return None


class BackupAndRestore(ResumingCallback):
    """Keras' `BackupAndRestore` for distributed training: only the root writes and reads.

    A backup holds weights, optimizer state, random states, callback states, epoch and batch: a file
    of safetensors and a manifest, both with digests of their bytes. Writes are atomic, and the
    previous backup is kept, so an intact backup exists whenever the writer is killed. If the newest
    backup is damaged, the root logs a warning and reads the previous one. All ranks receive the
    root's state and resume at the same step, also on another backend; only the root needs access
    to the directory. `keras_dist.checkpoints` reads a backup without `fit`.

    Resumed training is bitwise equal to uninterrupted training if the order of the data is the
    same: data that is not shuffled, or that `keras_dist.data` shuffles, because a backup includes
    the epoch of these datasets. A backup includes the random states of Python, NumPy, torch and
    Keras of each rank; with the same number of ranks, Keras' shuffling and `Dropout` without a seed
    resume as well. At the start of `fit` the root names data that cannot resume, such as a
    `tf.data.Dataset` that shuffles before it is sharded. With `shuffle="global"` a different number
    of ranks may resume, within an epoch at the next unseen sample.

    All optimizers of the model are saved: that of `compile` and optimizers among the attributes of
    a model with a custom `train_step`, including optimizers that are built in the first step.

    Keras' callbacks resume, `EarlyStopping` with its best weights; rows that `CSVLogger` wrote of
    repeated epochs are removed. A user callback resumes if it has the methods `state_dict()` and
    `load_state_dict(state)`. A state consists of JSON values, NumPy arrays and tensors in dicts,
    lists and tuples. `load_state_dict` may be called twice and must replace the state. One warning
    of the root names the user callbacks without these methods. Callbacks are matched by class and
    by position among the callbacks of that class. If a callback stopped training, it stays stopped.

    A backup within an epoch (`save_freq` is a number, or the job received a signal) resumes within
    the epoch. Batches that were trained on are read and skipped: no hooks are called for them, and
    changes of `on_epoch_begin` to the model and its learning rate are undone. Metrics, moving
    statistics and random generators of each rank resume. With a different number of ranks, rank 0
    has the totals of the metrics, moving statistics are their averages over the ranks, random
    generators of the model are derived from the root's, and other generators restart. Accumulated
    gradients that are not applied yet are lost: make `save_freq` a multiple of
    `backward_passes_per_step`. Of variables that are local to each rank, only the root's are saved
    and restored, on the root.

    The replicas are verified before each write, see `VerifyReplicas`. If the disk is full, or any
    write fails after a first successful write, training continues, the root logs a warning and
    existing backups stay. A backup contains arrays and JSON only, no executable code.

    With `memory=True` the two newest backups also lie in the memory of the root's node and of the
    next node. A job that `keras-dist run` restarts reads the newest intact one on any node, the
    file on disk only if that is newer: when the root's node is lost, no disk is needed. If the
    memory is full, the root logs a warning, and the backup on disk remains. `fit` removes them at
    its end.

    Collective: every rank must pass the callback to `fit`, with the same arguments, behind
    `BroadcastGlobalVariablesCallback`.

    Args:
        backup_dir: local directory, used by this backup only.
        *args: see `keras.callbacks.BackupAndRestore`. Two backups are kept regardless of
            `double_checkpoint`.
        root_rank: rank that writes and reads. Defaults to 0.
        memory: whether backups also lie in memory. Defaults to `False`.
        **kwargs: see `keras.callbacks.BackupAndRestore`.

    Raises:
        CheckpointError: the first backup cannot be written, a backup cannot be read or removed, no
            existing backup is intact, or the only one is in the memory of another node and cannot
            be fetched; raised on every rank, by `fit`.
        MismatchError: the replicas differ; raised on every rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.

    Example:

    ```python
    backup = keras_dist.callbacks.BackupAndRestore("backups", save_freq=1000)
    model.fit(dataset, epochs=10, callbacks=keras_dist.callbacks(backup))
    ```
    """

    def __init__(
        self, backup_dir: Any, *args: Any, root_rank: int = 0, memory: bool = False, **kwargs: Any
    ):
        runtime.communicator().index_of_root(root_rank)
        path = pathlib.Path(str(backup_dir))
        store = Store(path, root_rank, by_all=False, memory=memory)
        super().__init__(backup_dir, *args, store=store, root_rank=root_rank, **kwargs)
        self.acts_on_job = "keeps copies of the job in memory" if memory else ""
