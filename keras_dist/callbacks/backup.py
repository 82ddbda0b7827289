"""Training that was interrupted goes on, on all ranks, from what the root has written."""

import functools
import itertools
import json
import logging
import pathlib
import shutil
from typing import Any, BinaryIO

import keras
import numpy as np

from keras_dist import _backends, _engine, errors, runtime
from keras_dist.callbacks.files import NEEDS_ROOM
from keras_dist.callbacks.verification import ENDING, verify_before_writing
from keras_dist.data import epochs
from keras_dist.keeping import generations
from keras_dist.keeping.attempts import Attempts
from keras_dist.keeping.root import on_root
from keras_dist.model_state import (
    accumulators,
    bytes_of,
    optimizers_of,
    random_states,
    state,
    variable_name,
)
from keras_dist.replicas import broadcast_state, separate_seeds

__all__ = ["BackupAndRestore"]

# Names in the file, beside the numbers of the variables.
ABOUT, SEED = "about", "seed"

_log = logging.getLogger("keras_dist")


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' `BackupAndRestore` for many ranks: only the root writes and reads.

    Weights, optimizer state, random states, epoch and batch are in one file, whose name carries a
    digest of its bytes. It takes its place in one go, and the one before stays until the next but
    one: whenever the writer is killed, a whole backup is there. One that is damaged is noticed and
    the one before is used, which the root says. All ranks receive the root's state and go on
    at the same place, also when only the root sees the directory.

    They go on to the same bits as without interruption where the data comes in the same order. It
    does when it is not shuffled, and when `keras_dist.data` shuffles it, as the epoch that each
    such data set has come to is kept too; Keras' own shuffling and that of a `tf.data.Dataset`
    before it is shared out begin anew. With `shuffle="global"` another number of ranks may go on:
    where the backup was made within an epoch, with the next unseen sample. On torch dropout needs
    a seed, or else it draws from torch's own generator.

    A backup in the midst of an epoch, `save_freq` being a number or a signal having come, resumes
    there: batches that have been learnt are read and passed over, callbacks see them with empty
    logs, and the metrics of that epoch are those of the others. Moving statistics are averaged over
    the ranks when it is written. Gradients that ranks have gathered and not yet applied are lost:
    let `save_freq` be a multiple of `backward_passes_per_step`. Of variables that each rank keeps
    for itself only the root's are kept, and only the root receives them again.

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
        runtime.communicator().place_of_root(root_rank)
        self.root_rank = root_rank
        self._directory = pathlib.Path(self.backup_dir)
        self._attempts = Attempts()
        self._whole: pathlib.Path | None = None  # on the root: the last one that is known to be
        self._data: dict[str, int] = {}
        self._step = 0  # batches of this epoch that have been learnt
        self._passed_over = 0  # of them, those before the interruption
        self._written: tuple[int, int] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks what the root finds in the directory, if anything."""
        if runtime.rank() == self.root_rank:
            _warn_of_forgetful_data()
        epoch, step, data = self._on_root(
            self._restore, "to restore the backup in", generations.ANEW
        )
        # Of an earlier fit of this model it would count again.
        self.model._initial_epoch = epoch
        self._written = None if epoch is None else (epoch, step)
        self._passed_over = step
        if epoch is not None:
            epochs.go_on_with(data)
            # The file holds those of the root, which would count for all ranks.
            for gathered in accumulators(optimizers_of(self.model)):
                gathered.assign(keras.ops.zeros(gathered.shape, gathered.dtype))
            broadcast_state(self.model, self.root_rank)
            separate_seeds(self.model, self.root_rank)
            _pass_over(self.model, step)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes to which epoch a backup in its midst is to go back."""
        self._current_epoch = epoch  # Keras counts from 0 until the first that it has seen end
        self._step = self._passed_over
        self._data = epochs.numbers()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts, and writes where it is to."""
        self._step = max(batch + 1, self._passed_over)
        if batch + 1 > self._passed_over:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, unless it does so at batches; the next epoch is the one to go on with."""
        self._data = epochs.numbers()
        self._step = self._passed_over = 0
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the backup, unless it is to be kept."""
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
        steps = _engine.allgather_object(
            runtime.communicator(), self._step, operation="the place of a backup"
        )
        self._step = max(steps)  # ranks that are out of data have made fewer
        if self._written != (self._current_epoch, self._step):
            self._save_model()
        return self._written == (self._current_epoch, self._step)

    def _save_model(self) -> None:
        verify_before_writing(self.model)
        if self._on_root(self._write, "to write a backup into", NEEDS_ROOM):
            self._written = (self._current_epoch, self._step)

    def _on_root(self, work: Any, what: str, remedy: str) -> Any:
        expected = f"{what} {self.backup_dir}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, remedy)

    def _write(self) -> bool:
        def write() -> bool:
            self._whole = generations.add(self._directory, self._save, self._whole)
            return True

        return self._attempts.make(write, f"to write a backup into {self.backup_dir}")

    def _save(self, file: BinaryIO) -> None:
        about = {
            "epoch": self._current_epoch,
            "step": self._step,
            "data": self._data,
            "ranks": runtime.size(),
            "global_batch": _global_batch(),
            "variables": _describe(self.model),
        }
        arrays: dict[str, Any] = {ABOUT: np.array(json.dumps(about))}
        for number, variable in enumerate(state(self.model)):
            arrays[str(number)] = bytes_of(variable)
        for number, variable in enumerate(random_states(self.model)):
            arrays[f"{SEED}{number}"] = bytes_of(variable)
        np.savez(file, **arrays)

    def _restore(self) -> tuple[int | None, int, dict[str, int]]:
        """Loads the newest whole backup; returns epoch and batch to go on with, the data's."""
        self._whole = generations.newest_whole(self._directory)
        return (None, 0, {}) if self._whole is None else self._load(self._whole)

    def _load(self, path: pathlib.Path) -> tuple[int, int, dict[str, int]]:
        if not self.model.built:
            raise ValueError("the model is not built; build it before fit")
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file[ABOUT]))
            self._check(about["variables"], path)
            for number, variable in enumerate(state(self.model)):
                _assign_bytes(variable, file[str(number)])
            for number, variable in enumerate(random_states(self.model)):
                _assign_bytes(variable, file[f"{SEED}{number}"])
        return about["epoch"], _steps_now(about), about["data"]

    def _check(self, written: list[list[Any]], path: pathlib.Path) -> None:
        """Checks that a file was written by a model and an optimizer such as these.

        Raises:
            CheckpointError: by others.
        """
        mine = _describe(self.model)
        none = ("none", None, None)
        pairs = itertools.zip_longest(mine, written, fillvalue=none)
        different = next((pair for pair in pairs if list(pair[0][1:]) != list(pair[1][1:])), None)
        if different is None:
            return
        (expected, *kind), (received, *other) = different
        raise errors.CheckpointError(
            errors.explain(
                runtime.where(),
                f"the {len(mine)} variables of this model and its optimizer in the backup {path}, "
                f"with {expected!r} of shape {kind[0]} and dtype {kind[1]}",
                f"{len(written)} variables, with {received!r} of shape {other[0]} and dtype "
                f"{other[1]} in that place",
                generations.ANEW,
            )
        )


def _global_batch() -> int | None:
    """Returns the samples in a step of all ranks, where their order is one for any number."""
    data = epochs.trained()
    return data.global_batch if data is not None else None


def _steps_now(about: dict[str, Any]) -> int:
    """Returns how many batches of this job have been learnt, by what a backup says of its own."""
    step, before, now = about["step"], about.get("global_batch"), _global_batch()
    if before and now and before != now:
        step, again = divmod(step * before, now)
        if again:
            _log.warning(
                "%d samples are learnt twice in epoch %d: the backup was written after a number "
                "that is no multiple of the global batch, %d.",
                again,
                about["epoch"] + 1,
                now,
            )
    elif step and not now and about.get("ranks", runtime.size()) != runtime.size():
        _log.warning(
            "The backup is of %d ranks, and its epoch goes on with %d, which see the data in "
            "another order: samples of it may come twice or not at all. "
            "keras_dist.data.shard(..., shuffle='global') has one order for any number of ranks.",
            about["ranks"],
            runtime.size(),
        )
    return step


def _warn_of_forgetful_data() -> None:
    data = epochs.trained()
    if data is not None and data.forgets is not None:
        _log.warning(
            "A backup cannot keep the order of %s: when it is resumed that begins anew. Give "
            "shard() the data before it is shuffled.",
            data.forgets,
        )


def _describe(model: keras.Model) -> list[tuple[str, list[int], str]]:
    """Returns names, shapes and dtypes of a model's weights and of its optimizer's variables."""
    return [(variable_name(one), list(one.shape), str(one.dtype)) for one in state(model)]


def _assign_bytes(variable: Any, raw: np.ndarray) -> None:
    dtype = np.asarray(keras.ops.convert_to_numpy(variable)).dtype
    variable.assign(raw.view(dtype).reshape(variable.shape))


def _pass_over(model: keras.Model, steps: int) -> None:
    """Makes the first steps of a fit take their batches and do nothing else."""
    step, backend = model.train_function, _backends.active()
    passes, again = divmod(steps, model.steps_per_execution)
    if again:
        _log.warning(
            "%d batches are learnt twice: the backup was written after %d of an epoch, which is no "
            "multiple of steps_per_execution=%d.",
            again,
            steps,
            model.steps_per_execution,
        )
    executions = [model.steps_per_execution] * passes

    def first_steps(*arguments: Any) -> Any:
        if executions:
            return backend.pass_over(executions.pop(), *arguments)
        model.train_function = step
        return step(*arguments)

    if executions:
        model.train_function = first_steps
