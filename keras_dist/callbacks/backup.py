"""Backup of training in progress, from which an interrupted job resumes on all ranks."""

import contextlib
import functools
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, BinaryIO

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import BackupAndRestore as KerasBackup
from keras_dist._compat.keras.models import initial_epoch_from
from keras_dist.callbacks import fit_state, rank_states, resumed_data
from keras_dist.callbacks.background_writer import NEEDS_ROOM
from keras_dist.callbacks.fit_state import FitState
from keras_dist.callbacks.random_state import RandomState
from keras_dist.callbacks.resumed_epoch import ResumedEpoch, end_at_once
from keras_dist.callbacks.unsaved_state import UnsavedState
from keras_dist.callbacks.verification import ENDING, verify_before_writing
from keras_dist.data import epochs
from keras_dist.storage import versioned_backups
from keras_dist.storage.memory_copies import MemoryCopies
from keras_dist.storage.retry_policy import RetryPolicy
from keras_dist.storage.root_action import on_root
from keras_dist.training import model_arrays
from keras_dist.training.fit_session import FitSession, is_stopped
from keras_dist.training.model_state import accumulators, has_weights, optimizers_of
from keras_dist.training.replicas import broadcast_state, build_optimizers_alike
from keras_dist.training.session_callback import SessionCallback
from keras_dist.training.sharded_state import gathered

ABOUT = "about"  # name of the JSON document among the arrays of the file


class BackupAndRestore(SessionCallback, KerasBackup):
    """Keras' `BackupAndRestore` for distributed training: only the root writes and reads.

    A backup is a single file with weights, optimizer state, random states, callback states, epoch
    and batch. Its name contains a digest of its bytes. Writes are atomic, and the previous backup
    is kept, so an intact backup exists whenever the writer is killed. If the newest backup is
    damaged, the root logs a warning and reads the previous one. All ranks receive the root's state
    and resume at the same step; only the root needs access to the directory.

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
    lists and tuples. `load_state_dict` may be called twice and must replace the state. The root
    warns once of any other callback whose attributes change after `on_epoch_begin`; state of the
    functions of a `LambdaCallback` is not detected. Callbacks are matched by class and by position
    among the callbacks of that class. If a callback stopped training, it stays stopped.

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
        super().__init__(str(backup_dir), *args, **kwargs)
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self.acts_on_job = "keeps copies of the job in memory" if memory else ""
        self._directory = pathlib.Path(self.backup_dir)
        self._retry_policy = RetryPolicy()
        self._intact: pathlib.Path | None = None  # on the root: the newest backup known intact
        self._copies = MemoryCopies(self._directory, root_rank, memory)
        self._copy: pathlib.Path | None = None  # on the root: the newest backup in memory
        self._data: dict[str, int] = {}
        # Trained batches of this epoch; whether on_epoch_begin of this epoch has been called.
        self._step, self._has_begun = 0, False
        self._written: tuple[int, int] | None = None
        self._random = RandomState()
        self._random_states: list[Any] = []
        self._fit, self._rank_states = FitState([], root_rank), list[fit_state.Packed]()
        self._unsaved: UnsavedState | None = None
        self._resumed: ResumedEpoch | None = None

    def enter(self, session: FitSession) -> None:
        """Finds the backup before other callbacks change their files."""
        session.backups.append(self)
        self._fit = FitState(session.callbacks, self.root_rank)
        self._copy = self._copies.find()
        resumes = self._on_root(self._find, "to find the backup in", versioned_backups.REMEDY)
        self._fit.agree(resumes)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the backup on all ranks, if the root has one."""
        optimizer = self.model.optimizer
        if has_weights(self.model) and optimizer is not None and not optimizer.built:
            # As on torch, JAX and several ranks: the saved state must not depend on the job's size.
            optimizer.build(self.model.trainable_variables)
        found = self._restore_model()
        # Clears the initial epoch of an earlier fit of this model, which may have failed.
        initial_epoch_from(self.model, None)
        self._written = self._resumed = None
        self._step = 0
        if found is None:
            return
        initial_epoch_from(self.model, found["epoch"])
        self._written = found["epoch"], found["step"]
        found["step"] = resumed_data.steps_now(found, warns=runtime.rank() == self.root_rank)
        epochs.restore(found["data"])
        self._random.resume(found.get("random"))
        self.after_hook(self._fit.restore_callbacks)
        if found["begun"]:
            self._step = found["step"]
            self._resumed = ResumedEpoch(self.session, self._fit, self._random, found)
        elif found["stopped"]:
            initial_epoch_from(self.model, end_at_once(found["epoch"], self.params["epochs"]))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch for backups within it."""
        self._keras_dist_epoch = epoch  # Keras counts from 0 until an epoch ends
        self._data = epochs.numbers()
        self._random.begin_epoch()
        self._copies.touch()
        self._has_begun = True
        if self._resumed is not None:
            self.after_hook(functools.partial(self._resume_epoch, self._resumed))
        if self._unsaved is not None:
            self.after_hook(self._unsaved.begin)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the batch and writes a backup if `save_freq` is reached."""
        self._step = batch + 1
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a backup that resumes at the next epoch, unless `save_freq` is a number."""
        if self._unsaved is not None:
            self.after_hook(self._unsaved.end)
        self._data = epochs.numbers()
        self._step, self._has_begun, self._resumed = 0, False, None
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the backup if `delete_checkpoint` is set."""
        initial_epoch_from(self.model, None)  # otherwise the next fit would start at that epoch
        if self.delete_checkpoint:
            verify_before_writing(self.model, ENDING)
            self._on_root(
                functools.partial(shutil.rmtree, self.backup_dir, ignore_errors=True),
                "to remove the backup in",
                "Remove it by hand.",
            )
        self._copies.remove()

    def save_now(self) -> bool:
        """Writes a backup of the current step, unless it is written already.

        Collective: every rank; blocks.

        Returns:
            Whether a backup of the current step exists.
        """
        steps = _engine.collectives.allgather_object(
            runtime.fit_communicator(), self._step, operation="the place of a backup"
        )
        self._step = max(steps)  # ranks that are out of data have trained fewer
        if self._written != (self._keras_dist_epoch, self._step):
            self._back_up()
        return self._written == (self._keras_dist_epoch, self._step)

    def _keras_dist_save(self) -> None:
        # Later callbacks of the list have not run the current hook yet.
        self.after_hook(self._back_up)

    def _back_up(self) -> None:
        statistics = verify_before_writing(self.model)
        self._random_states = self._random.gather(within=self._has_begun)
        self._rank_states = self._fit.gather(self.model, self.session.last_logs, statistics)
        self._copy = None
        with gathered(self.model, self.root_rank):
            self._copy = self._copies.write(self._save)
            has_written = self._on_root(self._write, "to write a backup into", NEEDS_ROOM)
        if has_written:
            self._written = (self._keras_dist_epoch, self._step)
        # The file has the averages. Training continues as without a backup.
        rank_states.assign_statistics(self.model, statistics)

    def _restore_model(self) -> dict[str, Any] | None:
        """Restores the model on all ranks; returns the other contents, or `None`: no backup."""
        found = self._read_state()
        if found is None:
            return None
        self._fit.found(found["parts"])
        # The file contains only the root's accumulated gradients, which other ranks must not get.
        for accumulator in accumulators(optimizers_of(self.model)):
            accumulator.assign(keras.ops.zeros(accumulator.shape, accumulator.dtype))
        states = self._fit.ranks()
        rank_states.restore_random(self.model, states, self.root_rank)
        rank_states.restore_statistics(self.model, states)
        return found

    def _read_state(self) -> dict[str, Any] | None:
        """Restores weights and optimizers on all ranks; returns the other contents, or `None`."""
        found = self._on_root(self._read, "to restore the backup in", versioned_backups.REMEDY)
        if found is not None:
            build_optimizers_alike(self.model)
            broadcast_state(self.model, self.root_rank)
        return found

    def _resume_epoch(self, resumed: ResumedEpoch) -> None:
        self._restore_model()  # callbacks may have changed the learning rate
        resumed.begin()

    def _on_root(self, work: Any, what: str, remedy: str) -> Any:
        expected = f"{what} {self.backup_dir}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, remedy)

    def _write(self) -> bool:
        def write() -> bool:
            number = self._copies.number()
            self._intact = versioned_backups.add(
                self._directory, self._save, self._intact, number=number
            )
            return True

        return self._retry_policy.attempt(write, f"to write a backup into {self.backup_dir}")

    def _save(self, file: BinaryIO) -> None:
        copy: BinaryIO | None = None
        with contextlib.suppress(OSError):  # of the memory, not of the disk
            copy = None if self._copy is None else self._copy.open("rb")
        if copy is None:
            np.savez(file, **self._arrays())
        else:
            with copy:
                shutil.copyfileobj(copy, file)

    def _arrays(self) -> dict[str, Any]:
        """Returns the contents of a backup: arrays by name, and a JSON document among them."""
        about = self._describe()
        arrays = model_arrays.write(self.model, about)
        self._add_fit(about, arrays)
        arrays[ABOUT] = np.array(json.dumps(about))
        return arrays

    def _add_fit(self, about: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Adds the states of callbacks and ranks to the JSON and the arrays of a backup."""
        fit_state.write([self._fit.of_callbacks(), *self._rank_states], about, arrays)

    def _describe(self) -> dict[str, Any]:
        """Returns the place of the fit and the random states, as JSON."""
        return {
            "epoch": self._keras_dist_epoch,
            "step": self._step,
            "begun": self._has_begun,
            "stopped": is_stopped(self.model),
            "data": self._data,
            "random": self._random_states,
            "ranks": runtime.fit_size(),
            "global_batch": resumed_data.global_batch(),
        }

    def _find(self) -> bool:
        resumed_data.warn_of_restarting_data()
        self._unsaved = UnsavedState(self._fit.callbacks)
        return self._has_backup()

    def _has_backup(self) -> bool:
        self._intact = versioned_backups.newest_intact(self._directory, self._copy)
        if self._intact is None:
            self._copies.check_not_lost()
        return self._intact is not None

    def _read(self) -> dict[str, Any] | None:
        if self._intact is None:
            return None
        with np.load(self._intact, allow_pickle=False) as file:
            about = json.loads(str(file[ABOUT]))
            model_arrays.restore(self.model, about, file, self._intact)
            return contents(about, file)


def contents(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the contents of a backup besides the model, of any version."""
    parts = fit_state.read(about, arrays)
    return {"begun": about["step"] > 0, "stopped": False, **about, "parts": parts}
