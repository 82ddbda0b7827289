"""Training that was interrupted goes on, on all ranks, from what the root has written."""

import functools
import json
import logging
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, BinaryIO

import keras
import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist._compat.keras.callbacks import BackupAndRestore as KerasBackup
from keras_dist._compat.keras.models import initial_epoch_from
from keras_dist.callbacks import fit_state, model_arrays, rank_states
from keras_dist.callbacks.background_writer import NEEDS_ROOM
from keras_dist.callbacks.callback_list import ListMember
from keras_dist.callbacks.fit_state import FitState
from keras_dist.callbacks.random_state import RandomState
from keras_dist.callbacks.resumed_epoch import ResumedEpoch, end_at_once
from keras_dist.callbacks.stopping import is_stopped
from keras_dist.callbacks.unsaved_state import UnsavedState
from keras_dist.callbacks.verification import ENDING, verify_before_writing
from keras_dist.data import epochs
from keras_dist.data.restarted_iterators import begun_anew
from keras_dist.storage import versioned_backups
from keras_dist.storage.retry_policy import RetryPolicy
from keras_dist.storage.root_action import on_root
from keras_dist.training.model_state import accumulators, has_weights, optimizers_of
from keras_dist.training.replicas import broadcast_state, build_optimizers_alike

__all__ = ["BackupAndRestore"]

ABOUT = "about"  # in the file, beside the names of arrays

_log = logging.getLogger("keras_dist")


class BackupAndRestore(ListMember, KerasBackup):
    """Keras' `BackupAndRestore` for many ranks: only the root writes and reads.

    Weights, optimizer state, random states, states of callbacks, epoch and batch are in one file,
    whose name carries a digest of its bytes. It takes its place in one go, and the one before stays
    until the next but one: whenever the writer is killed, a whole backup is there. One that is
    damaged is noticed and the one before is used, which the root says. All ranks receive the root's
    state and go on at the same place, also when only the root sees the directory.

    They go on to the same bits as without interruption where the data comes in the same order. It
    does when it is not shuffled, and when `keras_dist.data` shuffles it, as the epoch that each
    such data set has come to is kept too. The states of the generators of Python, numpy, torch and
    Keras are kept for each rank: with as many ranks as before, Keras' own shuffling and `Dropout`
    without a seed go on as well. What begins anew, such as a `tf.data.Dataset` that shuffles before
    it is shared out, the root names at the start of the fit. With `shuffle="global"` another number
    of ranks may go on: where the backup was made within an epoch, with the next unseen sample.

    All optimizers of the model are kept: that of `compile` and those that a custom `train_step`
    finds among its attributes, also where they are built at its first step.

    Keras' callbacks go on as well, `EarlyStopping` with its best weights; `CSVLogger` loses rows of
    epochs that are trained once more. One of the user's goes on where it offers `state_dict()` and
    `load_state_dict(state)`: JSON values, numpy arrays and tensors, in dicts, lists and tuples. The
    second may be called twice, so it must replace the state. Others whose attributes change behind
    `on_epoch_begin` the root names once; what functions of a `LambdaCallback` keep cannot be seen.
    A callback is known by its class and its place among those of that class in the list. Training
    that a callback has stopped stays stopped.

    A backup in the midst of an epoch, `save_freq` being a number or a signal having come, resumes
    there. Batches that have been learnt are read and skipped: no hook is called for them, and what
    `on_epoch_begin` does to the model and its rate is undone. Metrics and random generators of each
    rank go on. Where another number of ranks resumes, rank 0 has the totals of metrics, generators
    of the model follow from the root's, and others begin anew. Moving statistics are averaged over
    the ranks when a backup is written. Gradients that ranks have gathered and not yet applied are
    lost: let `save_freq` be a multiple of `backward_passes_per_step`. Of variables that each rank
    keeps for itself only the root's are kept, and only the root receives them again.

    Before each write the replicas are verified, see `VerifyReplicas`. A disk that is full does not
    end the training: the root says so, and the backups that are there stay. Nor does any failure
    after a first write that succeeded. A backup holds arrays and JSON, nothing that is executed.

    Collective: every rank must pass it to `fit`, with the same arguments, behind
    `BroadcastGlobalVariablesCallback`.

    Args:
        backup_dir: as in Keras; a local directory, of this backup alone.
        *args: as in Keras; two backups are kept whatever `double_checkpoint` says.
        root_rank: the rank that writes and reads. Defaults to 0.
        **kwargs: as in Keras.

    Raises:
        CheckpointError: the backup could not be written at all, read or removed, or none that is
            there is whole; raised on every rank, by `fit`.
        MismatchError: the replicas differ; raised on every rank, by `fit`.
        ArgumentError: `root_rank` is not a rank.
    """

    def __init__(self, backup_dir: Any, *args: Any, root_rank: int = 0, **kwargs: Any):
        super().__init__(str(backup_dir), *args, **kwargs)
        runtime.communicator().index_of_root(root_rank)
        self.root_rank = root_rank
        self._directory = pathlib.Path(self.backup_dir)
        self._retry_policy = RetryPolicy()
        self._whole: pathlib.Path | None = None  # on the root: the last one that is known to be
        self._data: dict[str, int] = {}
        # Batches of this epoch that have been learnt; whether callbacks have been told of it.
        self._step, self._has_begun = 0, False
        self._written: tuple[int, int] | None = None
        self._random = RandomState()
        self._of_ranks: list[Any] = []
        self._fit, self._parts = FitState([], root_rank), list[fit_state.Packed]()
        self._forgotten: UnsavedState | None = None
        self._resumed: ResumedEpoch | None = None

    def before_training(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the backup, while the files of other callbacks are as they were left."""
        self._fit = FitState(callbacks, self.root_rank)
        self._fit.agree(
            self._on_root(self._find, "to find the backup in", versioned_backups.REMEDY)
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks what the root finds in the directory, if anything."""
        optimizer = self.model.optimizer
        if has_weights(self.model) and optimizer is not None and not optimizer.built:
            # As on torch and JAX, and on many ranks: a job of another size builds the same.
            optimizer.build(self.model.trainable_variables)
        found = self._take_up()
        # Of an earlier fit of this model, which may have failed, it would count again.
        initial_epoch_from(self.model, None)
        self._written = self._resumed = None
        self._step = 0
        if found is None:
            return
        initial_epoch_from(self.model, found["epoch"])
        self._written = found["epoch"], found["step"]
        found["step"] = _steps_now(found, warns=runtime.rank() == self.root_rank)
        epochs.go_on_with(found["data"])
        self._random.resume(found.get("random"))
        self.when_all_have_been_called(self._fit.restore_callbacks)
        if found["begun"]:
            self._step = found["step"]
            self._resumed = ResumedEpoch(
                self.model, self._fit, self._random, found, self.whole_list
            )
        elif found["stopped"]:
            initial_epoch_from(self.model, end_at_once(found["epoch"], self.params["epochs"]))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes to which epoch a backup in its midst is to go back."""
        self._keras_dist_epoch = epoch  # Keras counts from 0 until the first that it has seen end
        self._data = epochs.numbers()
        self._random.begin_epoch()
        self._has_begun = True
        if self._resumed is not None:
            self.when_all_have_been_called(functools.partial(self._resume_epoch, self._resumed))
        if self._forgotten is not None:
            self.when_all_have_been_called(self._forgotten.begin)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts, and writes where it is to."""
        self._step = batch + 1
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, unless it does so at batches; the next epoch is the one to go on with."""
        if self._resumed is not None:
            self._resumed.end()
        if self._forgotten is not None:
            self.when_all_have_been_called(self._forgotten.end)
        self._data = epochs.numbers()
        self._step, self._has_begun, self._resumed = 0, False, None
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the backup, unless it is to be kept."""
        initial_epoch_from(self.model, None)  # or the next fit would begin there
        if self.delete_checkpoint:
            verify_before_writing(self.model, ENDING)
            self._on_root(
                functools.partial(shutil.rmtree, self.backup_dir, ignore_errors=True),
                "to remove the backup in",
                "Remove it by hand.",
            )

    def save_now(self) -> bool:
        """Writes what has been reached, unless that has been written.

        Collective: every rank; blocks.

        Returns:
            Whether it is there.
        """
        steps = _engine.collectives.allgather_object(
            runtime.communicator(), self._step, operation="the place of a backup"
        )
        self._step = max(steps)  # ranks that are out of data have made fewer
        if self._written != (self._keras_dist_epoch, self._step):
            self._back_up()
        return self._written == (self._keras_dist_epoch, self._step)

    def _keras_dist_save(self) -> None:
        # Keras calls it in a hook that callbacks behind this one have still to see.
        self.when_all_have_been_called(self._back_up)

    def _back_up(self) -> None:
        verify_before_writing(self.model)
        self._of_ranks = self._random.gather(within=self._has_begun)
        self._parts = self._fit.gather(self.model, self.last_logs())
        if self._on_root(self._write, "to write a backup into", NEEDS_ROOM):
            self._written = (self._keras_dist_epoch, self._step)

    def _take_up(self) -> dict[str, Any] | None:
        """Gives all ranks the model of the backup; returns what else is in it, if there is one."""
        found = self._on_root(self._restore, "to restore the backup in", versioned_backups.REMEDY)
        if found is None:
            return None
        self._fit.found(found["parts"])
        # The file holds those of the root, which would count for all ranks.
        for gathered in accumulators(optimizers_of(self.model)):
            gathered.assign(keras.ops.zeros(gathered.shape, gathered.dtype))
        build_optimizers_alike(self.model)
        broadcast_state(self.model, self.root_rank)
        rank_states.restore_random(self.model, self._fit.ranks(), self.root_rank)
        return found

    def _resume_epoch(self, resumed: ResumedEpoch) -> None:
        self._take_up()  # callbacks may have set another rate
        resumed.begin()

    def _on_root(self, work: Any, what: str, remedy: str) -> Any:
        expected = f"{what} {self.backup_dir}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, remedy)

    def _write(self) -> bool:
        def write() -> bool:
            self._whole = versioned_backups.add(self._directory, self._save, self._whole)
            return True

        return self._retry_policy.attempt(write, f"to write a backup into {self.backup_dir}")

    def _save(self, file: BinaryIO) -> None:
        about = {
            "epoch": self._keras_dist_epoch,
            "step": self._step,
            "begun": self._has_begun,
            "stopped": is_stopped(self.model),
            "data": self._data,
            "random": self._of_ranks,
            "ranks": runtime.size(),
            "global_batch": _global_batch(),
        }
        arrays = model_arrays.write(self.model, about)
        fit_state.write([self._fit.of_callbacks(), *self._parts], about, arrays)
        arrays[ABOUT] = np.array(json.dumps(about))
        np.savez(file, **arrays)

    def _find(self) -> bool:
        _warn_of_forgetful_data()
        self._forgotten = UnsavedState(self._fit.callbacks)
        self._whole = versioned_backups.newest_intact(self._directory)
        return self._whole is not None

    def _restore(self) -> dict[str, Any] | None:
        if self._whole is None:
            return None
        with np.load(self._whole, allow_pickle=False) as file:
            about = json.loads(str(file[ABOUT]))
            model_arrays.restore(self.model, about, file, self._whole)
            parts = fit_state.read(about, file)
        return {"begun": about["step"] > 0, "stopped": False, **about, "parts": parts}


def _global_batch() -> int | None:
    """Returns the samples in a step of all ranks, where their order is one for any number."""
    data = epochs.trained()
    return data.global_batch if data is not None else None


def _steps_now(about: dict[str, Any], warns: bool) -> int:
    """Returns how many batches of this job have been learnt, by what a backup says of its own."""
    say = _log.warning if warns else _log.debug
    step, before, now = about["step"], about.get("global_batch"), _global_batch()
    if before and now and before != now:
        step, again = divmod(step * before, now)
        if again:
            say(
                "%d samples are learnt twice in epoch %d: the backup was written after a number "
                "that is no multiple of the global batch, %d.",
                again,
                about["epoch"] + 1,
                now,
            )
    elif step and not now and about.get("ranks", runtime.size()) != runtime.size():
        say(
            "The backup is of %d ranks, and its epoch goes on with %d, which see the data in "
            "another order: samples of it may come twice or not at all. "
            "keras_dist.data.shard(..., shuffle='global') has one order for any number of ranks.",
            about["ranks"],
            runtime.size(),
        )
    return step


def _warn_of_forgetful_data() -> None:
    found = begun_anew(epochs.trained_with(), keras.backend.backend())
    if found:
        _log.warning(
            "keras_dist: a backup does not keep %s: that begins anew when training is resumed, "
            "which then ends with other weights. keras_dist.data.shard(...) has an order that is "
            "found again; give it data before it is shuffled, and leave out steps_per_epoch.",
            "; nor ".join(found),
        )
